// Tests of the interpreter: small kernels with known results, faults or refusals.
#include <cmath>
#include <set>

#include "codec_cuda_cases.hpp"
#include "grid.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace ptx {
namespace {

using zcomm::test::Bytes;
using zcomm::test::DeviceBuffer;

// A kernel of up to 64 threads that is given two addresses, in %rd1 and %rd2; in %rd3 and %rd4 they are 4 bytes further
// for each thread. %r0 is the thread.
std::string kernel_text(const std::string& body, const std::string& variables = "") {
  return R"(.version 9.0
.target sm_90
.address_size 64
)" + variables +
         R"(.visible .entry test(
  .param .align 8 .b8 test_param_0[16]
)
.maxntid 64, 1, 1
{
  .reg .pred %p<9>;
  .reg .b16 %rs<9>;
  .reg .b32 %r<20>;
  .reg .b64 %rd<9>;
  .shared .align 4 .b8 room[256];
  mov.u32 %r0, %tid.x;
  ld.param.u64 %rd1, [test_param_0];
  ld.param.u64 %rd2, [test_param_0+8];
  mul.wide.u32 %rd5, %r0, 4;
  add.s64 %rd3, %rd1, %rd5;
  add.s64 %rd4, %rd2, %rd5;
)" + body +
         "\n  ret;\n}\n";
}

// Words that a kernel of this body writes, one of each thread, given those that it reads.
std::vector<u32> run(const std::string& body, const std::vector<u32>& in, std::size_t num_out, u32 threads = kLanes,
                     const std::string& variables = "") {
  const Module module = parse(kernel_text(body, variables));
  Bytes bytes(4 * in.size());
  std::memcpy(bytes.data(), in.data(), bytes.size());
  const DeviceBuffer source(bytes), target(Bytes(4 * num_out));
  const std::byte* const parameter[] = {source.data(), target.data()};
  run_grid(module.kernels.at("test"), 1, threads, parameter, sizeof parameter);
  const Bytes written = target.bytes();
  std::vector<u32> out(num_out);
  std::memcpy(out.data(), written.data(), written.size());
  return out;
}

// Returns the fault of a kernel with this body.
std::string fault(const std::string& body, u32 threads = kLanes) {
  CHECK(take_reports().empty());
  run(body, std::vector<u32>(64), 64, threads);
  std::string all;
  for (const auto& [what, report] : take_reports()) all += (all.empty() ? "" : "; ") + what;
  return all;
}

// Returns the result of an instruction with target %r4 and sources %r1, %r2 and %r3.
u32 result(const std::string& instruction, u32 a, u32 b = 0, u32 c = 0) {
  const std::string body =
      "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];\n" + instruction + "\nst.global.u32 [%rd4], %r4;";
  const std::vector<u32> out = run(body, {a, b, c, 0}, kLanes);
  CHECK(std::count(out.begin(), out.end(), out[0]) == kLanes);
  return out[0];
}

// Resets the settings, as without variables, until the end of a test.
class Plain {
 public:
  Plain() { settings() = {}; }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;
  ~Plain() { settings() = saved_; }

 private:
  const Settings saved_ = settings();
};

std::string refusal(const std::string& body) {
  try {
    parse(kernel_text(body));
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_SUITE("PTX") {
  TEST_CASE("integers and bits") {
    CHECK(result("sub.s32 %r4, %r1, %r2;", 1, 2) == ~0u);
    CHECK(result("mul.hi.u32 %r4, %r1, %r2;", 0x80000001u, 6) == 3);
    CHECK(result("mad.lo.s32 %r4, %r1, %r2, %r3;", 7, 9, 11) == 74);
    CHECK(result("mul.wide.s32 %rd6, %r1, %r2; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r4, %rd6;", ~0u, 2) == ~0u);
    CHECK(result("shl.b32 %r4, %r1, 32;", 1) == 0);
    CHECK(result("shr.s32 %r4, %r1, 40;", 0x80000000u) == ~0u);
    CHECK(result("shf.r.wrap.b32 %r4, %r1, %r2, %r3;", 0x11223344u, 0xaabbccddu, 40) == 0xdd112233u);
    CHECK(result("prmt.b32 %r4, %r1, %r2, 0xc061;", 0x11223344u, 0xaabbccddu) == 0xff44bb33u);
    CHECK(result("bfi.b32 %r4, %r1, %r2, 8, 12;", 0xfedcbau, 0x11111111u) == 0x111cba11u);
    CHECK(result("div.u32 %r4, %r1, %r2;", ~0u, 10) == 429496729u);
    CHECK(result("shf.l.wrap.b32 %r4, %r1, %r2, %r3;", 0x11223344u, 0xaabbccddu, 40) == 0xbbccdd11u);
    CHECK(result("brev.b32 %r4, %r1;", 0x80000006u) == 0x60000001u);
    CHECK(result("popc.b32 %r4, %r1;", 0x800000f0u) == 5);
    CHECK(result("clz.b32 %r4, %r1;", 0x00800001u) == 8);
    CHECK(result("bfind.shiftamt.u32 %r4, %r1;", 0x00800001u) == 8);
    CHECK(result("bfind.shiftamt.u32 %r4, %r1;", 0) == ~0u);
    CHECK(result("mov.b32 {%rs1, %rs2}, %r1; mul.wide.u16 %r4, %rs1, %rs2;", 0xfffffffeu) == 0xfffd0002u);
    // Uses 64-bit sources, with the lower half in %r1.
    const auto wide = [&](const std::string& instruction, u32 low, u32 high, u32 other = 0) {
      return result("mov.b64 %rd6, {%r1, %r2}; mov.b64 %rd7, {%r3, 0}; " + instruction, low, high, other);
    };
    CHECK(wide("clz.b64 %r4, %rd6;", 1, 0) == 63);
    CHECK(wide("not.b64 %rd6, %rd6; cvt.u32.u64 %r4, %rd6;", 1, 0) == ~1u);
    CHECK(wide("neg.s64 %rd6, %rd6; shr.u64 %rd6, %rd6, 32; cvt.u32.u64 %r4, %rd6;", 1, 0) == ~0u);
    CHECK(wide("min.u64 %rd6, %rd6, %rd7; cvt.u32.u64 %r4, %rd6;", 3, 1, 7) == 7);
    CHECK(wide("div.u64 %rd6, %rd6, %rd7; cvt.u32.u64 %r4, %rd6;", 0, 10, 20) == 0x80000000u);
    CHECK(wide("bfi.b64 %rd6, %rd7, %rd6, 28, 8; shr.u64 %rd6, %rd6, 28; cvt.u32.u64 %r4, %rd6;", 0, ~0u, 0x123u) ==
          0xffffff23u);
    CHECK(result("mov.b32 {%rs1, %rs2}, %r1; sub.s16 %rs1, %rs1, %rs2; shr.u16 %rs1, %rs1, 4; cvt.u64.u16 %rd6, %rs1; "
                 "cvt.u16.u64 %rs2, %rd6; mov.b32 %r4, {%rs1, %rs2};",
                 0x00020001u) == 0x0fff0fffu);
    CHECK(result("mov.b32 {%rs1, %rs2}, %r1; add.s16 %rs1, %rs1, %rs2; mov.b32 %r4, {%rs1, %rs2};", 0x8001ffffu) ==
          0x80018000u);
    CHECK(result("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r4, 5, 6, %p1;", ~0u, 1) == 5);
    CHECK(result("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r4, 5, 6, %p1;", ~0u, 1) == 6);
    CHECK(result("setp.lt.u32 %p1, %r1, %r2; @!%p1 mov.u32 %r4, 9;", ~0u, 1) == 9);
  }

  TEST_CASE("floating-point numbers") {
    const Plain plain;
    const u32 one = as_bits(1.0f), two = as_bits(2.0f), nan = 0x7fc00000u, minus = 0x80000000u;
    CHECK(result("add.rn.f32 %r4, %r1, %r2;", one, as_bits(0x1p-24f)) == one);
    CHECK(result("mul.rn.f32 %r4, %r1, %r2;", 1, two) == 2);  // subnormal numbers count
    CHECK(result("div.rn.f32 %r4, %r1, %r2;", one, as_bits(3.0f)) == 0x3eaaaaabu);
    CHECK(result("sqrt.rn.f32 %r4, %r1;", two) == 0x3fb504f3u);
    CHECK(result("fma.rn.f32 %r4, %r1, %r2, %r3;", as_bits(1 + 0x1p-23f), as_bits(1 - 0x1p-23f), as_bits(-1.0f)) ==
          as_bits(-0x1p-46f));
    CHECK(result("add.rn.f32 %r4, %r1, %r2;", 0xffc12345u, one) == 0x7fffffffu);
    CHECK(result("max.NaN.f32 %r4, %r1, %r2;", minus, 0) == 0);
    CHECK(result("max.NaN.xorsign.abs.f32 %r4, %r1, %r2;", minus | two, one) == (minus | two));
    CHECK(result("max.NaN.xorsign.abs.f16x2 %r4, %r1, %r2;", 0x7e013c00u, 0x3c00c000u) == 0x7fffc000u);
    CHECK(result("max.NaN.bf16x2 %r4, %r1, %r2;", 0x3f80bf80u, 0x4000bf00u) == 0x4000bf00u);
    CHECK(result("cvt.rn.f16x2.f32 %r4, %r1, %r2;", as_bits(65520.0f), as_bits(0x1p-25f)) == 0x7c000000u);
    CHECK(result("cvt.rn.bf16x2.f32 %r4, %r1, %r2;", one + 0x8000u, one + 0x18000u) == 0x3f803f82u);
    CHECK(result("rcp.approx.ftz.f32 %r4, %r1;", as_bits(-4.0f)) == as_bits(-0.25f));
    CHECK(result("rcp.approx.ftz.f32 %r4, %r1;", 0x007fffffu) == kInfinity);
    const auto compares = [&](const char* comparison, u32 a, u32 b) {
      return result(std::string("setp.") + comparison + ".f32 %p1, %r1, %r2; selp.u32 %r4, 1, 0, %p1;", a, b) == 1;
    };
    for (const char* comparison : {"eq", "ne", "lt", "le", "gt", "ge", "num"}) CHECK(!compares(comparison, one, nan));
    for (const char* comparison : {"equ", "neu", "ltu", "leu", "gtu", "geu", "nan"})
      CHECK(compares(comparison, nan, one));
    for (const char* comparison : {"lt", "le", "ne", "neu", "ltu", "leu", "num"}) CHECK(compares(comparison, one, two));
    for (const char* comparison : {"gt", "ge", "eq", "equ", "gtu", "geu", "nan"})
      CHECK(!compares(comparison, one, two));
  }

  TEST_CASE("float16 of every pattern, and of what lies between two") {
    for (u32 bits = 0; bits < 0x7c00u; ++bits) {
      const float value = from_float16(bits), next = bits == 0x7bffu ? 65536.0f : from_float16(bits + 1);
      const float middle = value + (next - value) / 2;
      CAPTURE(bits);
      REQUIRE(std::ldexp(static_cast<float>(bits < 0x400 ? bits : 0x400 | (bits & 0x3ff)),
                         (bits < 0x400 ? -24 : static_cast<int>(bits >> 10) - 25)) == value);
      REQUIRE(to_float16(value) == bits);
      REQUIRE(to_float16(-std::nextafter(middle, value)) == (bits | 0x8000u));
      REQUIRE(to_float16(middle) == bits + (bits & 1u));
      REQUIRE(to_float16(std::nextafter(middle, next)) == bits + 1);
    }
  }

  TEST_CASE("lanes that part meet again") {
    // Every lane adds 1 as often as its index says, then all take the sum of a pair.
    const std::vector<u32> out = run(R"(
      mov.u32 %r1, 0;
      $again:
      setp.ge.u32 %p1, %r1, %r0;
      @%p1 bra $met;
      add.s32 %r1, %r1, 1;
      bra.uni $again;
      $met:
      shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, -1;
      add.s32 %r2, %r2, %r1;
      st.global.u32 [%rd4], %r2;)",
                                     {}, kLanes);
    for (u32 l = 0; l < kLanes; ++l) CHECK(out[l] == (l / 2) * 4 + 1);
    CHECK(take_reports().empty());
  }

  TEST_CASE("what a warp stores the other reads after a barrier, in every order") {
    const Plain plain;
    for (const Order order : {Order::forward, Order::backward, Order::random}) {
      settings().order = order;
      const std::vector<u32> out = run(R"(
        mov.u32 %r1, room;
        shl.b32 %r2, %r0, 2;
        add.s32 %r3, %r1, %r2;
        st.shared.u32 [%r3], %r0;
        bar.sync 0;
        sub.s32 %r3, %r1, %r2;
        ld.shared.u32 %r4, [%r3+252];
        st.global.u32 [%rd4], %r4;)",
                                       {}, 64, 64);
      for (u32 i = 0; i < 64; ++i) CHECK(out[i] == 63 - i);
    }
    CHECK(take_reports().empty());
  }

  TEST_CASE("atomics of all lanes take effect, and are ordered among each other") {
    const auto last = [&](const std::string& body) { return run(body, {~0u, 1, 2, 0}, kLanes).back(); };
    CHECK(last(R"(
      mov.u32 %r1, room;
      setp.eq.s32 %p1, %r0, 0;
      @%p1 st.shared.u32 [%r1], 0;
      bar.sync 0;
      shl.b32 %r2, 1, %r0;
      atom.shared.or.b32 %r3, [%r1], %r2;
      bar.sync 0;
      ld.shared.u32 %r4, [%r1];
      st.global.u32 [%rd4], %r4;)") == ~0u);
    CHECK(last("cvt.u64.u32 %rd6, %r0; red.global.add.u64 [%rd1], %rd6; ld.global.v2.u32 {%r1, %r2}, [%rd1];"
               "add.s32 %r1, %r1, %r2; st.global.u32 [%rd4], %r1;") == 495 + 2);
    CHECK(last("atom.global.or.b32 %r1, [%rd1+8], %r0; st.global.u32 [%rd4], %r1;") == 31);
    CHECK(take_reports().empty());
  }

  TEST_CASE("a variable of the module is read") {
    const std::vector<u32> out = run(R"(
      mov.u64 %rd6, numbers;
      add.s64 %rd6, %rd6, %rd5;
      ld.global.nc.u32 %r1, [%rd6];
      st.global.u32 [%rd4], %r1;)",
                                     {}, 3, 3, ".global .align 4 .b8 numbers[12] = {1, 2, 3, 4, 255, 0, 0, 0, 7};\n");
    CHECK(out == std::vector<u32>{0x04030201u, 255, 7});
    CHECK(take_reports().empty());
  }

  TEST_CASE("faults are reported") {
    CHECK(fault("ld.global.u32 %r1, [%rd3];") == "");
    CHECK(fault("ld.global.v2.u32 {%r1, %r2}, [%rd1+4];") == "misaligned access");
    CHECK(fault("ld.global.u32 %r1, [%rd1+256];") == "load out of bounds of global memory");
    CHECK(fault("st.global.u32 [%rd1+-4], %r0;") == "store out of bounds of global memory");
    CHECK(fault("ld.param.u64 %rd1, [test_param_0+16];") == "out of bounds of the parameter");
    CHECK(fault("mov.u32 %r1, room; st.shared.u32 [%r1+256], %r0;") == "out of bounds of shared memory");
    CHECK(fault("st.global.u32 [%rd4], %r9;") == "undefined value stored");
    CHECK(fault("add.s32 %r8, %r9, 1; st.global.u32 [%rd4], %r8;") == "undefined value stored");
    CHECK(fault("setp.eq.s32 %p1, %r9, 0; @%p1 bra $end; $end:") == "undefined guard");
    CHECK(fault("setp.eq.s32 %p1, %r0, 99; setp.eq.s32 %p2, %r9, 0; and.pred %p3, %p1, %p2; @%p3 bra $end; $end:") ==
          "");
    CHECK(fault("mov.u32 %r1, room; ld.shared.u32 %r2, [%r1];") == "shared memory read before it is written");
    CHECK(fault("mov.u32 %r1, room; st.shared.u32 [%r1], %r0;") == "race in shared memory");
    CHECK(fault("mov.u32 %r1, room; setp.eq.s32 %p1, %r0, 0; @%p1 st.shared.u32 [%r1], 7; ld.shared.u32 %r2, [%r1];") ==
          "race in shared memory");
    const std::string store = "mov.u32 %r1, room; setp.eq.s32 %p1, %r0, 0; @%p1 st.shared.u32 [%r1], 7; ";
    CHECK(fault(store + "bar.warp.sync -1; ld.shared.u32 %r2, [%r1];") == "");
    CHECK(fault(store + "shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1; ld.shared.u32 %r2, [%r1];") ==
          "race in shared memory");
    CHECK(fault(store + "atom.shared.or.b32 %r2, [%r1], %r0;") == "race in shared memory");
    CHECK(fault("ld.global.nc.u32 %r1, [%rd3];") == "load out of bounds of a variable");
    CHECK(fault("setp.eq.s32 %p1, %r0, 0; @%p1 bra $end; bar.warp.sync -1; ret; $end: bar.warp.sync -1;") ==
          "lanes wait for each other at different instructions");
    CHECK(fault("setp.eq.s32 %p1, %r0, 0; @%p1 bra $end; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; ret; $end: "
                "shfl.sync.bfly.b32 %r1, %r0, 2, 31, -1;") == "lanes wait for each other at different instructions");
    CHECK(fault("setp.eq.s32 %p1, %r0, 0; @%p1 bra $end; bar.sync 0; ret; $end: bar.sync 0;") ==
          "lanes wait for each other at different instructions");
    CHECK(fault("setp.eq.s32 %p1, %r0, 0; @%p1 ret; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;") ==
          "a shuffle reads a lane that takes no part");
    CHECK(fault("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 1;") == "a lane comes that a shuffle or barrier does not name");
    CHECK(fault("", 65) == "more threads than .maxntid");
  }

  TEST_CASE("what is not known is refused when it is read") {
    CHECK(refusal("fma.rz.f32 %r1, %r1, %r1, %r1;") ==
          "PTX, line 20: expected an instruction that is known, got 'fma.rz.f32'");
    CHECK(refusal("add.s32 %r1, %r2, %q3;") == "PTX, line 20: expected a register, got '%q3'");
    CHECK(refusal("add.s32 %r1, %r2, %rd3;") == "PTX, line 20: expected an operand of 32 bits, got '64 bits'");
    CHECK(refusal("ld.local.u32 %r1, [%rd1];") ==
          "PTX, line 20: expected a load or store that is known, got 'ld.local'");
    CHECK(refusal("atom.global.max.u32 %r1, [%rd1], %r2;") ==
          "PTX, line 20: expected an atomic that is known, got 'atom.global.max.u32'");
    CHECK(refusal("bra $nowhere;") == "PTX, line 23: expected a label, got '$nowhere'");
    CHECK(refusal("bar.sync 1;") == "PTX, line 20: expected barrier 0, got '1'");
  }

  TEST_CASE("what PTX leaves open can vary") {
    const Plain plain;
    settings().reciprocal_error = -1;
    CHECK(result("rcp.approx.ftz.f32 %r4, %r1;", as_bits(4.0f)) == as_bits(0.25f) - 1);
    settings().random_nans = true;
    const std::vector<u32> nans =
        run("mov.u32 %r1, 0x7fc00000; neg.f32 %r2, %r1; st.global.u32 [%rd4], %r2;", {}, kLanes);
    CHECK(std::all_of(nans.begin(), nans.end(), is_nan));
    CHECK(std::set(nans.begin(), nans.end()).size() > 1);
  }
}

}  // namespace ptx
