// Exchanges and broadcasts, which are compressed if the options name a format for them.
#include <numeric>

#include "c10d/base/tensors.hpp"
#include "process_group.hpp"
#include "zcomm/exchange.hpp"

namespace zcomm::c10d_binding {
namespace {

using Lengths = std::vector<std::int64_t>;

void check_same_dtype(at::TensorList tensors, const char* name, const at::Tensor& like, const char* like_name) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), "zcomm: ", name, ": expected dtype ",
                      like.scalar_type(), " as in ", like_name, ", got ", tensor.scalar_type());
  }
}

void check_count(const std::vector<at::Tensor>& tensors, int size, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<std::size_t>(size), "zcomm: ", name,
                    ": expected a tensor for each of ", size, " ranks, got ", tensors.size());
}

// Refuses tensors that only this rank would send exactly: peers compress the call, whatever the layout is here.
void check_layout(const Policy& policy, const Call& call, int size) {
  Call elsewhere = call;
  elsewhere.contiguous = true;
  TORCH_CHECK_VALUE(call.contiguous || decide(policy, elsewhere, size) != Verdict::compressed,
                    "zcomm: tensors: expected contiguous ones on one device, as ", to_string(call.collective),
                    " is compressed, got others");
}

// Returns the elements of each rank in a tensor that is split along its first dimension: equally without `splits`.
Lengths split_lengths(const at::Tensor& tensor, const Lengths& splits, int size, const char* name) {
  const std::int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  const std::int64_t row_elements = rows == 0 ? 0 : tensor.numel() / rows;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "zcomm: ", name, ": expected a multiple of ", size, " rows, got ", rows);
    return Lengths(static_cast<std::size_t>(size), rows / size * row_elements);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<std::size_t>(size), "zcomm: ", name,
                    "_split_sizes: expected one for each of ", size, " ranks, got ", splits.size());
  Lengths lengths;
  for (const std::int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "zcomm: ", name, "_split_sizes: expected 0 or more rows for each rank, got ", split);
    lengths.push_back(split * row_elements);
  }
  const std::int64_t total = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  TORCH_CHECK_VALUE(total == rows, "zcomm: ", name, "_split_sizes: expected a sum of the ", rows, " rows of ", name,
                    ", got ", total);
  return lengths;
}

// Returns the plan of an all-to-all of tensors as on this rank.
ExchangePlan all_to_all_of(CompressedCalls& calls, const Policy& policy, const at::Tensor& tensor, Lengths sent,
                           Lengths received) {
  World world = calls.world(tensor.device().type());
  const auto min_bytes = static_cast<std::size_t>(policy.min_bytes / world.topology.size());
  return ExchangePlan::all_to_all(std::move(world), std::move(sent), std::move(received), dtype_of(tensor).value(),
                                  policy.all_to_all, min_bytes);
}

Lengths lengths_of(const std::vector<at::Tensor>& tensors) {
  Lengths lengths;
  for (const at::Tensor& tensor : tensors) lengths.push_back(tensor.numel());
  return lengths;
}

}  // namespace

WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                    std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  if (getSize() > 1) check_in_order(output, "output");
  const CallSettings settings = settings_of(opts);
  Lengths sent, received;
  const auto check = [&] {
    check_same_dtype(output, "output", input, "input");
    sent = split_lengths(input, input_splits, getSize(), "input");
    received = split_lengths(output, output_splits, getSize(), "output");
  };
  const Call call = describe(Collective::all_to_all, Form::single, output, {&input, 1});
  check_layout(settings.policy, call, getSize());
  if (!compressed_.compresses(settings.policy, call, check)) {
    return inner_.forward("all_to_all", input, output, settings.timeout, [&](::c10d::Backend& inner) {
      return inner.alltoall_base(output, input, output_splits, input_splits, opts);
    });
  }
  return compressed_.exchange(Collective::all_to_all, ::c10d::OpType::ALLTOALL_BASE, "zcomm:all_to_all",
                              all_to_all_of(compressed_, settings.policy, input, sent, received), {input}, {output},
                              settings);
}

WorkPtr ProcessGroup::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                               const ::c10d::AllToAllOptions& opts) {
  check_count(inputs, getSize(), "input_tensor_list");
  check_count(outputs, getSize(), "output_tensor_list");
  const CallSettings settings = settings_of(opts);
  Call call = describe(Collective::all_to_all, Form::list, inputs[0], inputs);
  const Call received = describe(Collective::all_to_all, Form::list, inputs[0], outputs);
  call.contiguous = call.contiguous && received.contiguous;
  if (!call.dtype) call.dtype = received.dtype;  // empty of complex tensors, too
  check_layout(settings.policy, call, getSize());
  const auto check = [&] {
    check_same_dtype(inputs, "input_tensor_list", inputs[0], "the first tensor");
    check_same_dtype(outputs, "output_tensor_list", inputs[0], "input_tensor_list");
  };
  if (!compressed_.compresses(settings.policy, call, check)) {
    return inner_.forward("all_to_all", inputs, outputs, settings.timeout,
                          [&](::c10d::Backend& inner) { return inner.alltoall(outputs, inputs, opts); });
  }
  return compressed_.exchange(
      Collective::all_to_all, ::c10d::OpType::ALLTOALL, "zcomm:all_to_all",
      all_to_all_of(compressed_, settings.policy, inputs[0], lengths_of(inputs), lengths_of(outputs)), inputs, outputs,
      settings);
}

WorkPtr ProcessGroup::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                             const ::c10d::GatherOptions& opts) {
  TORCH_CHECK_VALUE(inputs.size() == 1, "zcomm: tensor: expected one, got ", inputs.size());
  const int root = static_cast<int>(opts.rootRank);
  const bool is_root = root == getRank();
  const std::vector<at::Tensor> gathered = is_root && outputs.size() == 1 ? outputs[0] : std::vector<at::Tensor>();
  const CallSettings settings = settings_of(opts);
  Call call = describe(Collective::gather, Form::list, inputs[0], gathered);
  call.num_bytes = static_cast<std::int64_t>(inputs[0].nbytes()) * getSize();
  check_layout(settings.policy, call, getSize());
  const auto check = [&] {
    if (is_root) check_list(gathered, inputs[0], getSize(), "gather_list", "tensor");
  };
  if (!compressed_.compresses(settings.policy, call, check)) {
    return inner_.forward("gather", inputs, inputs, settings.timeout,
                          [&](::c10d::Backend& inner) { return inner.gather(outputs, inputs, opts); });
  }
  ExchangePlan plan = ExchangePlan::gather(compressed_.world(inputs[0].device().type()), root, inputs[0].numel(),
                                           dtype_of(inputs[0]).value(), settings.policy.gather);
  return compressed_.exchange(Collective::gather, ::c10d::OpType::GATHER, "zcomm:gather", std::move(plan), inputs,
                              gathered, settings);
}

WorkPtr ProcessGroup::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                              const ::c10d::ScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == 1, "zcomm: tensor: expected one, got ", outputs.size());
  if (getSize() > 1) check_in_order(outputs, "tensor");
  if (getSize() > 1 && !inputs.empty()) check_in_order(inputs[0], "scatter_list");
  const int root = static_cast<int>(opts.rootRank);
  const bool is_root = root == getRank();
  const std::vector<at::Tensor> scattered = is_root && inputs.size() == 1 ? inputs[0] : std::vector<at::Tensor>();
  const CallSettings settings = settings_of(opts);
  Call call = describe(Collective::scatter, Form::list, outputs[0], scattered);
  call.num_bytes = static_cast<std::int64_t>(outputs[0].nbytes()) * getSize();
  check_layout(settings.policy, call, getSize());
  const auto check = [&] {
    if (is_root) check_list(scattered, outputs[0], getSize(), "scatter_list", "tensor");
  };
  if (!compressed_.compresses(settings.policy, call, check)) {
    return inner_.forward("scatter", outputs, outputs, settings.timeout,
                          [&](::c10d::Backend& inner) { return inner.scatter(outputs, inputs, opts); });
  }
  ExchangePlan plan = ExchangePlan::scatter(compressed_.world(outputs[0].device().type()), root, outputs[0].numel(),
                                            dtype_of(outputs[0]).value(), settings.policy.scatter);
  return compressed_.exchange(Collective::scatter, ::c10d::OpType::SCATTER, "zcomm:scatter", std::move(plan), scattered,
                              outputs, settings);
}

WorkPtr ProcessGroup::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "zcomm: tensor: expected one, got ", tensors.size());
  if (getSize() > 1) check_no_gaps(tensors[0]);
  const CallSettings settings = settings_of(opts);
  const Call call = describe(Collective::broadcast, Form::single, tensors[0], tensors);
  check_layout(settings.policy, call, getSize());
  if (!compressed_.compresses(settings.policy, call, [] {})) {
    return inner_.forward("broadcast", tensors, tensors, settings.timeout,
                          [&](::c10d::Backend& inner) { return inner.broadcast(tensors, opts); });
  }
  return compressed_.broadcast(tensors[0], static_cast<int>(opts.rootRank), settings);
}

}  // namespace zcomm::c10d_binding
