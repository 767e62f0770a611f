#include "c10d/policy.hpp"

#include <doctest/doctest.h>

#include "zcomm/error.hpp"

namespace zcomm {
namespace {

Call fsdp_gather() {
  Call call;
  call.collective = Collective::all_gather;
  call.dtype = DType::bfloat16;
  call.num_bytes = 1 << 20;
  call.in_place = true;
  return call;
}

Call fsdp_scatter() {
  Call call = fsdp_gather();
  call.collective = Collective::reduce_scatter;
  call.in_place = false;
  return call;
}

template <class Change>
Verdict after(Call call, Change change, Policy policy = {}, int size = 4) {
  change(call, policy);
  return decide(policy, call, size);
}

}  // namespace

TEST_CASE("promise 7: the default table, and nothing else, is compressed") {
  CHECK(decide({}, fsdp_gather(), 4) == Verdict::compressed);
  CHECK(decide({}, fsdp_scatter(), 4) == Verdict::compressed);
  CHECK(decide({}, fsdp_gather(), 1) == Verdict::single_rank);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.in_place = false; }) == Verdict::out_of_place);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.form = Form::coalesced; }) == Verdict::form);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.form = Form::list; }) == Verdict::form);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy&) { c.form = Form::list; }) == Verdict::form);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.num_bytes = Policy{}.min_bytes - 1; }) == Verdict::min_bytes);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.num_bytes = Policy{}.min_bytes; }) == Verdict::compressed);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.dtype.reset(); }) == Verdict::dtype);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) {
          c.dtype.reset();
          c.floating_point = false;
        }) == Verdict::not_a_float);
  CHECK(after(fsdp_gather(), [](Call& c, Policy&) { c.contiguous = false; }) == Verdict::layout);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy&) { c.linear = false; }) == Verdict::operation);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy&) { c.collective = Collective::all_reduce; }) ==
        Verdict::format_exact);
}

TEST_CASE("each opt-in compresses what it names") {
  CHECK(after(fsdp_gather(), [](Call& c, Policy& p) {
          c.in_place = false;
          p.out_of_place = true;
        }) == Verdict::compressed);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy& p) {
          c.form = Form::list;
          p.lists = true;
        }) == Verdict::compressed);
  CHECK(after(fsdp_gather(), [](Call& c, Policy& p) {
          c.form = Form::coalesced;
          c.in_place = false;
          p.coalesced = true;
        }) == Verdict::compressed);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy& p) {
          c.collective = Collective::all_reduce;
          p.all_reduce = HopFormats::parse("int8:128");
        }) == Verdict::compressed);
}

TEST_CASE("a bf16 wire is the exact path for 16-bit values") {
  const auto bf16 = [](Call&, Policy& p) { p.all_gather = BlockFormat::parse("bf16"); };
  CHECK(after(fsdp_gather(), bf16) == Verdict::format_exact);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) {
          bf16(c, p);
          c.dtype = DType::float32;
        }) == Verdict::compressed);
}

TEST_CASE("routes: a direct reduce-scatter is exact, by one of two options, and not for every call") {
  const auto route = [](auto change) {
    Call call = fsdp_scatter();
    Policy policy;
    policy.small_reduce_scatter.direct = true;
    change(call, policy);
    return route_of(policy, call, decide(policy, call, 4));
  };
  const auto small = [](Call& c, Policy&) { c.num_bytes = Policy{}.min_bytes - 1; };
  CHECK(route([](Call&, Policy&) {}) == Route::compressed);
  CHECK(route(small) == Route::direct);
  CHECK(route([&](Call& c, Policy& p) { small(c, p), p.small_reduce_scatter = {}; }) == Route::inner);
  CHECK(route([&](Call& c, Policy& p) { small(c, p), p.reduce_scatter = {}; }) == Route::inner);  // zcomm.exact()
  CHECK(route([&](Call& c, Policy& p) { small(c, p), c.linear = false; }) == Route::inner);
  CHECK(route([&](Call& c, Policy& p) { small(c, p), c.dtype.reset(); }) == Route::inner);
  CHECK(route([&](Call& c, Policy& p) { small(c, p), c.contiguous = false; }) == Route::inner);
  CHECK(route([&](Call& c, Policy& p) { small(c, p), c.on_host = false; }) == Route::inner);
  CHECK(route([](Call& c, Policy&) { c.num_bytes = 0; }) == Route::inner);
  const auto direct = [](Call&, Policy& p) { p.reduce_scatter = HopFormats::parse("exact:direct"); };
  CHECK(route(direct) == Route::direct);
  CHECK(route([&](Call& c, Policy& p) { small(c, p), direct(c, p); }) == Route::direct);
  CHECK(route([&](Call& c, Policy& p) { direct(c, p), c.form = Form::list; }) == Route::direct);
  CHECK(route([&](Call& c, Policy& p) { direct(c, p), c.form = Form::coalesced; }) == Route::inner);
}

TEST_CASE("promise 8: strict raises for large floating-point calls that a policy would have compressed") {
  Policy strict;
  strict.strict = true;
  Call call = fsdp_gather();
  call.in_place = false;
  CHECK_THROWS_WITH_AS(enforce_strict(strict, call, decide(strict, call, 4)), doctest::Contains("out_of_place=True"),
                       Error);
  CHECK_NOTHROW(enforce_strict({}, call, Verdict::out_of_place));
  call.num_bytes = 100;
  CHECK_NOTHROW(enforce_strict(strict, call, decide(strict, call, 4)));
  CHECK_NOTHROW(enforce_strict(strict, fsdp_gather(), Verdict::compressed));
  CHECK_NOTHROW(enforce_strict(strict, fsdp_gather(), Verdict::format_exact));
  Call maximum = fsdp_scatter();
  maximum.linear = false;
  CHECK_THROWS_AS(enforce_strict(strict, maximum, decide(strict, maximum, 4)), Error);
}

}  // namespace zcomm
