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

// Returns the policy of a caller that is known to send gradients, and copies of weights.
Policy of_fsdp() {
  Policy policy;
  policy.known = policy.copies = true;
  return policy;
}

// Returns a policy that opts in to `forms`.
Policy with(std::initializer_list<std::string> forms) {
  Policy policy;
  policy.forms = Forms::parse(std::vector(forms));
  return policy;
}

Call in_form(Call call, Form form, bool in_place) {
  call.form = form;
  call.in_place = in_place;
  return call;
}

template <class Change>
Verdict after(Call call, Change change, Policy policy = of_fsdp(), int size = 4) {
  change(call, policy);
  return decide(policy, call, size);
}

}  // namespace

TEST_CASE("promise 7: the default table, and nothing else, is compressed") {
  for (const Form form : {Form::single, Form::list, Form::coalesced}) {
    for (const bool in_place : {false, true}) {
      CHECK(decide(of_fsdp(), in_form(fsdp_gather(), form, in_place), 4) == Verdict::compressed);
      CHECK(decide({}, in_form(fsdp_gather(), form, in_place), 4) != Verdict::compressed);
    }
    CHECK(decide(of_fsdp(), in_form(fsdp_scatter(), form, false), 4) == Verdict::compressed);
    CHECK(decide({}, in_form(fsdp_scatter(), form, false), 4) != Verdict::compressed);
  }
  Policy stepped = of_fsdp();
  stepped.copies = false;
  CHECK(decide(stepped, fsdp_gather(), 4) == Verdict::in_place);
  CHECK(decide({}, fsdp_gather(), 4) == Verdict::in_place);
  CHECK(decide({}, fsdp_scatter(), 4) == Verdict::unmarked);
  CHECK(decide({}, fsdp_gather(), 1) == Verdict::single_rank);
  CHECK(decide({}, in_form(fsdp_gather(), Form::single, false), 4) == Verdict::out_of_place);
  CHECK(decide({}, in_form(fsdp_gather(), Form::coalesced, false), 4) == Verdict::form);
  CHECK(decide({}, in_form(fsdp_gather(), Form::list, false), 4) == Verdict::form);
  CHECK(decide({}, in_form(fsdp_scatter(), Form::list, false), 4) == Verdict::form);
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
  CHECK(decide(with({"single"}), fsdp_scatter(), 4) == Verdict::compressed);
  CHECK(decide(with({"single"}), fsdp_gather(), 4) == Verdict::in_place);
  CHECK(decide(with({"out_of_place"}), in_form(fsdp_gather(), Form::single, false), 4) == Verdict::compressed);
  CHECK(decide(with({"list"}), in_form(fsdp_scatter(), Form::list, false), 4) == Verdict::compressed);
  CHECK(decide(with({"coalesced"}), in_form(fsdp_gather(), Form::coalesced, false), 4) == Verdict::compressed);
  // A gather of any form that would round the sender's slot needs another opt-in.
  for (const auto& [form, name] : {std::pair{Form::list, "list"}, std::pair{Form::coalesced, "coalesced"}}) {
    CHECK(decide(with({name}), in_form(fsdp_gather(), form, true), 4) == Verdict::in_place);
    CHECK(decide(with({name, "in_place"}), in_form(fsdp_gather(), form, true), 4) == Verdict::compressed);
    CHECK(decide(with({"in_place"}), in_form(fsdp_gather(), form, true), 4) == Verdict::form);
  }
  CHECK(after(fsdp_scatter(), [](Call& c, Policy& p) {
          c.collective = Collective::all_reduce;
          p.all_reduce = HopFormats::parse("int8:128");
        }) == Verdict::compressed);
}

TEST_CASE("a compiled graph's calls are compressed where that is opted in, in each of its forms") {
  const auto traced = [](Call& c, Policy& p) { p = with({"traced"}), c.may_be_traced = true; };
  CHECK(after(fsdp_gather(), traced) == Verdict::compressed);
  for (const Call& call : {fsdp_gather(), fsdp_scatter()}) {
    CHECK(after(call, [&](Call& c, Policy& p) { traced(c, p), c.form = Form::coalesced; }) == Verdict::compressed);
  }
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), c.in_place = false; }) == Verdict::out_of_place);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), c.form = Form::list; }) == Verdict::form);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), c.num_bytes = 8; }) == Verdict::min_bytes);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), p.all_gather = {}; }) == Verdict::format_exact);
  CHECK(after(fsdp_gather(), [&](Call& c, Policy& p) { traced(c, p), p.drops_traced = true; }) == Verdict::in_place);
}

TEST_CASE("groups are named by a pattern for their description, a mesh's dimension, or world") {
  const auto matches = [](const char* pattern, const char* description) {
    const std::string exact = "exact";
    return GroupRule::parse(pattern, {&exact, 1}).matches(description);
  };
  for (const char* pattern : {"fsdp", "mesh_fsdp", "fs*", "*", "mesh_*", "f?dp", "[ef]sdp"}) {
    CHECK(matches(pattern, "mesh_fsdp"));
  }
  for (const char* description : {"mesh_dp", "mesh_fsdp2", "mesh_", "undefined", "default_pg", ""}) {
    CHECK_FALSE(matches("fsdp", description));
  }
  CHECK(matches("fsdp*", "fsdp_extra"));
  CHECK(matches("world", "default_pg"));
  CHECK(matches("default_pg", "default_pg"));
  CHECK_FALSE(matches("world", "mesh_fsdp"));
  CHECK(matches("DATA_PARALLEL*", "DATA_PARALLEL_GROUP_WITH_CP"));
  CHECK_FALSE(matches("DATA_PARALLEL*", "TENSOR_AND_DATA_PARALLEL_GROUP"));
}

TEST_CASE("promise 7: a group has the forms of all patterns that name it, or none if one says exact") {
  const auto rule = [](const char* pattern, std::vector<std::string> names) {
    return GroupRule::parse(pattern, names);
  };
  Policy policy = with({"list"});
  policy.groups = {rule("dp*", {"single", "coalesced"}), rule("dp_tp", {"exact"}), rule("tp", {"exact"})};
  const auto in = [&](const char* description) {
    Policy narrowed = policy;
    narrowed.narrow_to(description);
    return narrowed;
  };
  CHECK(decide(in("mesh_dp"), fsdp_scatter(), 4) == Verdict::compressed);
  CHECK(decide(in("mesh_dp"), in_form(fsdp_scatter(), Form::list, false), 4) == Verdict::compressed);
  CHECK(decide(in("mesh_pp"), fsdp_scatter(), 4) == Verdict::unmarked);
  for (const char* exact : {"mesh_tp", "mesh_dp_tp"}) {
    CHECK(decide(in(exact), fsdp_scatter(), 4) == Verdict::group);
    CHECK(decide(in(exact), in_form(fsdp_scatter(), Form::list, false), 4) == Verdict::group);
    Policy known = in(exact);
    known.known = true;
    CHECK(decide(known, fsdp_scatter(), 4) == Verdict::group);
    Call call = fsdp_scatter();
    call.collective = Collective::all_to_all;
    known.exchanges = HopFormats::parse("int8:128");
    CHECK(decide(known, call, 4) == Verdict::group);
  }
  CHECK_THROWS_WITH_AS(rule("dp", {}), doctest::Contains("expected exact or single, in_place"), ArgumentError);
  CHECK_THROWS_WITH_AS(rule("dp", {"exact", "list"}), doctest::Contains("got 'exact'"), ArgumentError);
  for (const char* pattern : {"", "a=b", "a;b", "it's"}) {
    CHECK_THROWS_WITH_AS(rule(pattern, {"list"}), doctest::Contains("expected a pattern without quotes"),
                         ArgumentError);
  }
}

TEST_CASE("forms: names in any order, and what is unknown is refused with those that are known") {
  const std::vector<std::string> names = {"traced", "list", "single", "in_place", "list"};
  const Forms forms = Forms::parse(names);
  CHECK(forms.in_place);
  CHECK(forms.list);
  CHECK_FALSE(forms.out_of_place);
  CHECK(forms.names() == std::vector<std::string>{"single", "in_place", "list", "traced"});
  CHECK(Forms::parse(forms.names()) == forms);
  CHECK(Forms::parse({}) == Forms{});
  for (const std::string name : {"", "lists", "traced:fsdp", "exact"}) {
    CHECK_THROWS_WITH_AS(Forms::parse({&name, 1}),
                         doctest::Contains("expected single, in_place, out_of_place, list, coalesced, traced, got"),
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
  CHECK_THROWS_WITH_AS(enforce_strict(strict, fsdp_scatter(), decide(strict, fsdp_scatter(), 4)),
                       doctest::Contains("forms='single'"), Error);
  CHECK_NOTHROW(enforce_strict(strict, fsdp_scatter(), Verdict::group));
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
