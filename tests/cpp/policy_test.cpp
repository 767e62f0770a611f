#include "c10d/policy/policy.hpp"

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

// Returns the policy of zcomm.fsdp, whose gathers are of copies.
Policy of_fsdp() {
  Policy policy;
  policy.forms.in_place = true;
  return policy;
}

template <class Change>
Verdict after(Call call, Change change, Policy policy = of_fsdp(), int size = 4) {
  change(call, policy);
  return decide(policy, call, size);
}

}  // namespace

TEST_CASE("promise 7: the default table, and nothing else, is compressed") {
  CHECK(decide(of_fsdp(), fsdp_gather(), 4) == Verdict::compressed);
  CHECK(decide({}, fsdp_gather(), 4) == Verdict::in_place);
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
  // No format compresses integers: to say that the format is exact would be advice to change it.
  CHECK(after(fsdp_scatter(), [](Call& c, Policy&) {
          c.collective = Collective::all_reduce;
          c.floating_point = false;
        }) == Verdict::not_a_float);
}

TEST_CASE("each opt-in compresses what it names") {
  CHECK(after(fsdp_gather(), [](Call& c, Policy& p) {
          c.in_place = false;
          p.forms.out_of_place = true;
        }) == Verdict::compressed);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy& p) {
          c.form = Form::list;
          p.forms.list = true;
        }) == Verdict::compressed);
  CHECK(after(fsdp_gather(), [](Call& c, Policy& p) {
          c.form = Form::coalesced;
          c.in_place = false;
          p.forms.coalesced = true;
        }) == Verdict::compressed);
  CHECK(after(fsdp_scatter(), [](Call& c, Policy& p) {
          c.collective = Collective::all_reduce;
          p.all_reduce = HopFormats::parse("int8:128");
        }) == Verdict::compressed);
}

TEST_CASE("a compiled graph's calls are compressed in the groups that are named, in each of its forms") {
  const auto traced = [](Call& c, Policy& p) { p.forms.in_place = false, c.traced = true; };
  CHECK(after(fsdp_gather(), traced) == Verdict::compressed);
  for (const Call& call : {fsdp_gather(), fsdp_scatter()}) {
    CHECK(after(call, [&](Call& c, Policy& p) { traced(c, p), c.form = Form::coalesced; }) == Verdict::compressed);
  }
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), c.in_place = false; }) == Verdict::out_of_place);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), c.form = Form::list; }) == Verdict::form);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), c.num_bytes = 8; }) == Verdict::min_bytes);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), p.all_gather = {}; }) == Verdict::format_exact);
}

TEST_CASE("groups are named by their dimension, as a whole") {
  using Names = std::vector<std::string>;
  for (const Names& names : {Names{"fsdp"}, Names{"dp_shard", "fsdp"}, Names{"dp_shard", "fsdp", "world"}}) {
    CHECK(names_group(names, "mesh_fsdp"));
    CHECK_FALSE(names_group(names, "mesh_dp"));
    CHECK_FALSE(names_group(names, "mesh_fsdp2"));
    CHECK_FALSE(names_group(names, "fsdp"));
    CHECK_FALSE(names_group(names, "undefined"));
    CHECK_FALSE(names_group(names, "mesh_"));
    CHECK_FALSE(names_group(names, ""));
  }
  CHECK(names_group(Names{"world"}, "default_pg"));
  CHECK_FALSE(names_group(Names{"default_pg"}, "default_pg"));
  CHECK_FALSE(names_group(Names{"fsdp"}, "default_pg"));
  for (const char* description : {"", "mesh_", "default_pg"}) CHECK_FALSE(names_group({}, description));
}

TEST_CASE("forms: names in any order, and what is unknown is refused with those that are known") {
  const std::vector<std::string> names = {"traced:tp", "list", "traced:fsdp", "in_place", "traced:tp"};
  const Forms forms = Forms::parse(names);
  CHECK(forms.in_place);
  CHECK(forms.list);
  CHECK_FALSE(forms.out_of_place);
  CHECK(forms.names() == std::vector<std::string>{"in_place", "list", "traced:fsdp", "traced:tp"});
  CHECK(Forms::parse(forms.names()) == forms);
  CHECK(Forms::parse({}) == Forms{});
  for (const std::string name : {"", "lists", "traced", "traced:", "traced:a b", "traced:it's"}) {
    CHECK_THROWS_WITH_AS(Forms::parse({&name, 1}),
                         doctest::Contains("expected in_place, out_of_place, list, coalesced, or traced:DIM"),
                         ArgumentError);
  }
}

TEST_CASE("a bf16 wire is the exact path for 16-bit values") {
  const auto bf16 = [](Call&, Policy& p) { p.all_gather = BlockFormat::parse("bf16"); };
  CHECK(after(fsdp_gather(), bf16) == Verdict::format_exact);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) {
          bf16(c, p);
          c.dtype = DType::float32;
        }) == Verdict::compressed);
}

TEST_CASE("promise 8: strict raises for large floating-point calls that a policy would have compressed") {
  Policy strict;
  strict.strict = true;
  Call call = fsdp_gather();
  call.in_place = false;
  CHECK_THROWS_WITH_AS(enforce_strict(strict, call, decide(strict, call, 4)), doctest::Contains("forms='out_of_place'"),
                       Error);
  CHECK_NOTHROW(enforce_strict({}, call, Verdict::out_of_place));
  CHECK_THROWS_WITH_AS(enforce_strict(strict, fsdp_gather(), decide(strict, fsdp_gather(), 4)),
                       doctest::Contains("forms='in_place'"), Error);
  call.num_bytes = 100;
  CHECK_NOTHROW(enforce_strict(strict, call, decide(strict, call, 4)));
  CHECK_NOTHROW(enforce_strict(strict, fsdp_gather(), Verdict::compressed));
  CHECK_NOTHROW(enforce_strict(strict, fsdp_gather(), Verdict::format_exact));
  Call maximum = fsdp_scatter();
  maximum.linear = false;
  CHECK_THROWS_AS(enforce_strict(strict, maximum, decide(strict, maximum, 4)), Error);
  maximum.collective = Collective::all_reduce;  // exact, as nobody asked for another format
  CHECK_NOTHROW(enforce_strict(strict, maximum, decide(strict, maximum, 4)));
}

}  // namespace zcomm
