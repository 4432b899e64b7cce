// Gives the ops of the stub their results. Each op on CUDA runs unchanged, with its allocations and launches. Then a
// task in the same stream computes it with PyTorch's CPU kernels on the memory of the stub's device. So numbers are
// right if, and only if, the streams are in the right order.

#include "settings.h"
#include "shared.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using torch::jit::Stack;
// A function of arguments in, results out.
using Function = std::function<void(Stack&)>;

struct Entry {
  c10::SafeKernelFunction original;
  std::optional<c10::SafeKernelFunction> cpu;  // empty if there is a twin or no result to compute
  Function twin;         // on the CPU, instead of the op's own kernel
  Function stand_in;     // on the device, instead of a kernel that fails on the stub
  bool unknown = false;   // neither: its results stay uninitialized
  bool by_value = false;  // the shapes of its results depend on the values of its inputs
  size_t arguments = 0, returns = 0;
};

std::map<std::string, std::unique_ptr<Entry>>& entries() {
  static auto* one = new std::map<std::string, std::unique_ptr<Entry>>;
  return *one;
}

// The state of this thread.
enum class Within { kNothing, kOp, kTask };
thread_local Within within = Within::kNothing;

class Entered {
 public:
  explicit Entered(Within what) : before_(std::exchange(within, what)) {}
  ~Entered() { within = before_; }
  Entered(const Entered&) = delete;

 private:
  Within before_;
};

struct Suppressed {
  Suppressed() { stub_suppress(1); }
  ~Suppressed() { stub_suppress(0); }
  Suppressed(const Suppressed&) = delete;
};

std::atomic<uint64_t> computed{0}, failed{0};
constexpr uint64_t kMostTold = 50;

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}
bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// Returns the same bytes as a CPU tensor. Tensors that are on the CPU, such as numbers, are copied: they may change
// before the task runs.
Tensor mirror(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda()) return tensor.device().is_cpu() ? tensor.clone() : tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(std::nullopt);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* memory = stub_memory(tensor.const_data_ptr());
  TORCH_CHECK(memory != nullptr, "a tensor of the device lies where its kernels cannot read");
  Tensor made = at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}
c10::IValue mirror(const c10::IValue& value) {
  if (value.isTensor()) return mirror(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& each : value.toTensorVector()) made.push_back(mirror(each));
    return made;
  }
  if (value.isList() && value.type()->isSubtypeOf(*c10::ListType::create(c10::OptionalType::ofTensor()))) {
    c10::List<std::optional<Tensor>> made;
    for (const c10::IValue& each : value.toListRef())
      made.push_back(each.isNone() ? std::optional<Tensor>() : std::optional<Tensor>(mirror(each.toTensor())));
    return made;
  }
  if (value.isDevice()) return c10::IValue(c10::Device(c10::kCPU));
  return value;
}

void flatten(const c10::IValue& value, std::vector<Tensor>& into) {
  if (value.isTensor()) into.push_back(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& each : value.toTensorVector()) into.push_back(each);
  if (value.isTuple())
    for (const c10::IValue& each : value.toTupleRef().elements()) flatten(each, into);
}

// Isolates the computing thread from its state: autograd, Python modes, autocast. It also bypasses the fallback of
// eager loops, whose lock the host may hold while it waits for the device.
const c10::DispatchKeySet kAround({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                   c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Fake});
struct Plain {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | kAround};
};
struct WithAutograd {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet({c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView}),
      c10::autocast_dispatch_keyset | kAround};
  at::AutoGradMode on{true};
};

// A run of an op.
struct Work {
  std::string name;
  c10::OperatorHandle op;
  const Entry* entry;
  Stack arguments;              // on the CPU
  std::vector<Tensor> results;  // on the CPU: the memory of the returned tensors
};

void compute(const Work& work) {
  Stack stack = work.arguments;
  if (work.entry->twin)
    work.entry->twin(stack);
  else
    work.entry->cpu->callBoxed(work.op, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  std::vector<Tensor> found;
  for (const c10::IValue& each : stack) flatten(each, found);
  for (size_t i = 0; i < work.results.size() && i < found.size(); ++i) {
    const Tensor& to = work.results[i];
    if (!to.defined() || !found[i].defined() || to.numel() == 0) continue;
    if (to.const_data_ptr() == found[i].const_data_ptr()) continue;  // written in place
    TORCH_CHECK(to.numel() == found[i].numel(), "result ", i, " has the shape ", found[i].sizes(), " on the CPU and ",
                to.sizes(), " on the device");
    to.copy_(found[i].reshape(to.sizes()));
  }
}

void perform(void* data) {
  const Work& work = *static_cast<Work*>(data);
  const Plain plain;
  const Entered entered(Within::kTask);
  try {
    compute(work);
    ++computed;
  } catch (const std::exception& error) {
    if (++failed < kMostTold) std::fprintf(stderr, "replay: %s failed: %.400s\n", work.name.c_str(), error.what());
  }
}
void drop(void* data) { delete static_cast<Work*>(data); }

// The seed for the draws of one call, from the state of the device's generator.
at::Generator drawn(const c10::IValue* given) {
  const bool named = given != nullptr && given->isGenerator() && given->toGenerator().device().is_cuda();
  const at::Generator device = named ? given->toGenerator() : at::cuda::detail::getDefaultCUDAGenerator();
  return at::detail::createCPUGenerator(device.current_seed() * 0x9e3779b97f4a7c15ULL +
                                        device.get_offset() * 0x2545f4914f6cdd1dULL + 12345);
}

// Such sizes need the values, so the host waits for them, as on a GPU.
void call_by_value(const c10::OperatorHandle& op, const Entry& entry, void* stream, Stack* stack) {
  stub_synchronize(stream);
  Stack found;
  for (auto each = stack->end() - static_cast<ptrdiff_t>(entry.arguments); each != stack->end(); ++each)
    found.push_back(mirror(*each));
  {
    const Plain plain;
    const Entered entered(Within::kOp);
    entry.cpu->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::CPU), &found);
  }
  torch::jit::drop(*stack, entry.arguments);
  for (const c10::IValue& each : found) {
    if (!each.isTensor() || !each.toTensor().defined()) {
      stack->push_back(each);
      continue;
    }
    const Tensor result = each.toTensor();
    const Tensor made = at::empty_strided(result.sizes(), result.strides(), result.options().device(at::kCUDA));
    if (result.numel() != 0) mirror(made).copy_(result);
    stack->push_back(made);
  }
  ++computed;
}

// Large products and sums into given memory only measure speed. Their results are not read, and would take the host
// minutes.
constexpr int64_t kMeasured = int64_t{1} << 22;
bool is_a_measurement(const std::string& name, const c10::FunctionSchema& schema, const Stack& stack) {
  if (name != "aten::mm" && name != "aten::add") return false;
  if (schema.arguments().back().name() != "out" || !stack.back().isTensor()) return false;
  return stack.back().toTensor().numel() >= kMeasured;
}
bool copies_to_or_from_the_host(const std::string& name, const Stack& arguments) {
  if (name != "aten::copy_" && name != "aten::_foreach_copy_") return false;
  std::vector<Tensor> all;
  for (const c10::IValue& each : arguments) flatten(each, all);
  return std::any_of(all.begin(), all.end(), [](const Tensor& each) { return !each.is_cuda(); });
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Entry& entry = *entries().at(full_name(op.operator_name()));
  const c10::FunctionSchema& schema = op.schema();
  const std::string& name = op.operator_name().name;
  // Inner ops are computed with their outer op, except where their shapes depend on values.
  if (entry.unknown) {
    if (within == Within::kNothing && ++failed < kMostTold)
      std::fprintf(stderr, "replay: %s failed: no CPU kernel computes it\n", full_name(op.operator_name()).c_str());
    return entry.original.callBoxed(op, keys, stack);
  }
  const bool is_part = within == Within::kTask || (within == Within::kOp && !entry.by_value);
  if (is_part || is_a_measurement(name, schema, *stack)) return entry.original.callBoxed(op, keys, stack);
  const Stack arguments(stack->end() - static_cast<ptrdiff_t>(entry.arguments), stack->end());
  // Copies between device and host are real; the other parts of such an op are replayed by themselves.
  if (copies_to_or_from_the_host(name, arguments)) return entry.original.callBoxed(op, keys, stack);
  std::optional<size_t> generator;
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) generator = i;
  const bool dropout = name == "aten::native_dropout";
  at::Generator draws;
  if (generator || dropout) draws = drawn(generator ? &arguments[*generator] : nullptr);
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  if (entry.by_value) return call_by_value(op, entry, stream, stack);
  {
    const Entered entered(Within::kOp);
    const Suppressed suppressed;
    if (entry.stand_in) {
      Stack results = arguments;
      entry.stand_in(results);
      torch::jit::drop(*stack, entry.arguments);
      stack->insert(stack->end(), results.begin(), results.end());
      stub_issue(stream, "library", 10e-6, nullptr, nullptr, nullptr);
    } else {
      entry.original.callBoxed(op, keys, stack);
    }
  }
  if (!stub::settings().numbers || (!entry.twin && !entry.cpu)) return;
  // The memory of the results and of the current arguments: an op may resize those that it writes.
  const Plain plain;
  const Entered entered(Within::kOp);
  auto work = std::make_unique<Work>(Work{full_name(op.operator_name()), op, &entry, {}, {}});
  for (auto each = stack->end() - static_cast<ptrdiff_t>(entry.returns); each != stack->end(); ++each) {
    std::vector<Tensor> found;
    flatten(*each, found);
    for (const Tensor& one : found) work->results.push_back(one.defined() && one.is_cuda() ? mirror(one) : Tensor());
  }
  for (const c10::IValue& each : arguments) work->arguments.push_back(mirror(each));
  if (generator) work->arguments[*generator] = draws;
  if (dropout) work->arguments.push_back(draws);
  stub_issue(stream, "op", 0, perform, work.release(), drop);
}

// Twins of ops that the CPU lacks, and device replacements

Tensor tensor(const Stack& stack, size_t i) { return stack[i].isNone() ? Tensor() : stack[i].toTensor(); }

void batch_norm(Stack& s) {
  auto [out, mean, inverse] = at::native_batch_norm(tensor(s, 0), tensor(s, 1), tensor(s, 2), tensor(s, 3), tensor(s, 4),
                                                    s[5].toBool(), s[6].toDouble(), s[7].toDouble());
  s = {out, mean, inverse};
}
void batch_norm_backward(Stack& s) {
  auto [x, weight, bias] =
      at::native_batch_norm_backward(tensor(s, 1), tensor(s, 0), tensor(s, 2), tensor(s, 3), tensor(s, 4), tensor(s, 5),
                                     tensor(s, 6), true, s[7].toDouble(), {true, true, true});
  s = {x, weight, bias};
}
std::vector<int64_t> last_dimensions(size_t count) {
  std::vector<int64_t> found;
  for (size_t i = 1; i <= count; ++i) found.push_back(-static_cast<int64_t>(i));
  return found;
}
void rms_norm(Stack& s) {
  const Tensor x = tensor(s, 0).to(at::kFloat), weight = tensor(s, 2);
  const double least = std::numeric_limits<float>::epsilon();
  const Tensor squares = x.square().mean(last_dimensions(s[1].toIntVector().size()), true);
  const Tensor inverse = (squares + (s[3].isNone() ? least : s[3].toDouble())).rsqrt();
  const Tensor out = weight.defined() ? x * inverse * weight.to(at::kFloat) : x * inverse;
  s = {out.to(tensor(s, 0).scalar_type()), inverse};
}
void rms_norm_backward(Stack& s) {
  const Tensor g = tensor(s, 0).to(at::kFloat), x = tensor(s, 1), weight = tensor(s, 4), inverse = tensor(s, 3);
  const size_t count = s[2].toIntVector().size();
  const Tensor normed = x.to(at::kFloat) * inverse, scaled = weight.defined() ? g * weight.to(at::kFloat) : g;
  const Tensor dx = (scaled - normed * (scaled * normed).mean(last_dimensions(count), true)) * inverse;
  Tensor dweight;
  if (weight.defined()) dweight = (g * normed).reshape({-1, weight.numel()}).sum(0).view(weight.sizes()).to(weight.scalar_type());
  s = {dx.to(x.scalar_type()), dweight};
}
void dropout(Stack& s) {
  const Tensor x = tensor(s, 0);
  const double p = s[1].toDouble();
  const bool train = s[2].isNone() || s[2].toBool();
  if (!train || p == 0) {
    s = {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
    return;
  }
  const Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(1 - p, s.back().toGenerator());
  s = {x * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Computes attention by its definition, in single precision.
struct Attention {
  Tensor q, k, v, bias;
  bool causal;
  double scale;

  // A key and value head may serve several query heads.
  Tensor for_each_query(const Tensor& x) const {
    return x.size(1) == q.size(1) ? x : x.repeat_interleave(q.size(1) / x.size(1), 1);
  }
  Tensor summed(const Tensor& gradient, const Tensor& like) const {
    if (gradient.size(1) == like.size(1)) return gradient;
    const int64_t heads = like.size(1);
    return gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
  }
  Tensor scores() const {
    Tensor found = at::matmul(q.to(at::kFloat), for_each_query(k).to(at::kFloat).transpose(-2, -1)) * scale;
    if (bias.defined()) found = found + bias.to(at::kFloat);
    if (!causal) return found;
    return found.masked_fill(at::ones({q.size(-2), k.size(-2)}, at::kBool).tril().logical_not(), -INFINITY);
  }
  std::pair<Tensor, Tensor> forward() const {
    const Tensor found = scores();
    const Tensor out = at::matmul(at::softmax(found, -1), for_each_query(v).to(at::kFloat));
    return {out.to(q.scalar_type()), at::logsumexp(found, -1)};
  }
  std::array<Tensor, 3> backward(const Tensor& out, const Tensor& gradient) const {
    const Tensor weights = at::softmax(scores(), -1), g = gradient.to(at::kFloat);
    const Tensor dv = at::matmul(weights.transpose(-2, -1), g);
    const Tensor dweights = at::matmul(g, for_each_query(v).to(at::kFloat).transpose(-2, -1));
    const Tensor dscores = weights * (dweights - (g * out.to(at::kFloat)).sum(-1, true)) * scale;
    const Tensor dq = at::matmul(dscores, for_each_query(k).to(at::kFloat));
    const Tensor dk = at::matmul(dscores.transpose(-2, -1), q.to(at::kFloat));
    return {dq.to(q.scalar_type()), summed(dk, k).to(k.scalar_type()), summed(dv, v).to(v.scalar_type())};
  }
};
// The positions of attention's inputs among the arguments of a PyTorch op; -1: absent.
Attention attention(const Stack& s, size_t q, int bias, size_t causal, size_t scale) {
  const double given = s[scale].isNone() ? 1 / std::sqrt(static_cast<double>(tensor(s, q).size(-1))) : s[scale].toDouble();
  return {tensor(s, q),          tensor(s, q + 1), tensor(s, q + 2), bias < 0 ? Tensor() : tensor(s, static_cast<size_t>(bias)),
          s[causal].toBool(), given};
}
void efficient(Stack& s) { s = {attention(s, 0, 3, 6, 7).forward().first}; }
void efficient_backward(Stack& s) {
  auto [q, k, v] = attention(s, 1, 4, 11, 12).backward(tensor(s, 5), tensor(s, 0));
  s = {q, k, v};
}
void flash(Stack& s) { s = {attention(s, 0, -1, 4, 6).forward().first}; }
void flash_backward(Stack& s) {
  auto [q, k, v] = attention(s, 1, -1, 11, 14).backward(tensor(s, 4), tensor(s, 0));
  s = {q, k, v};
}
void cudnn(Stack& s) {
  auto [out, sums] = attention(s, 0, 3, 6, 8).forward();
  s = {out, sums.unsqueeze(-1)};
}
void cudnn_backward(Stack& s) {
  auto [q, k, v] = attention(s, 1, 8, 14, 15).backward(tensor(s, 4), tensor(s, 0));
  s = {q, k, v};
}
void cudnn_stand_in(Stack& s) {
  const Tensor q = tensor(s, 0), k = tensor(s, 1), v = tensor(s, 2);
  const Tensor out = q.sizes() == v.sizes() ? at::empty_like(q)
                                            : at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const Tensor sums = at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat));
  const Tensor seed = at::empty({}, q.options().dtype(at::kLong)), offset = at::empty({}, q.options().dtype(at::kLong));
  s = {out, sums, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()};
}
void cudnn_backward_stand_in(Stack& s) {
  s = {at::empty_like(tensor(s, 1)), at::empty_like(tensor(s, 2)), at::empty_like(tensor(s, 3))};
}

// Computes recurrent networks, without dropout between layers.
enum class Cell { kRelu, kTanh, kLstm, kGru };  // as cudnnRNNMode_t
struct Recurrent {
  Tensor input;
  std::vector<Tensor> weights;
  Tensor hidden, cell;  // cell: of an LSTM
  Cell kind;
  int64_t layers;
  bool batch_first, two_ways;

  // Reads the arguments from the cell kind on.
  static Recurrent of(const Stack& s, size_t kind) {
    TORCH_CHECK(s[kind + 8].toIntVector().empty(), "packed sequences are not computed");
    return {tensor(s, 0), s[1].toTensorVector(), tensor(s, 4), tensor(s, 5), static_cast<Cell>(s[kind].toInt()),
            s[kind + 3].toInt(), s[kind + 4].toBool(), s[kind + 7].toBool()};
  }
  std::vector<Tensor> forward() const {
    const bool biases = weights.size() > static_cast<size_t>(2 * layers * (two_ways ? 2 : 1));
    if (kind == Cell::kLstm) {
      auto [out, h, c] = at::lstm(input, {hidden, cell}, weights, biases, layers, 0.0, true, two_ways, batch_first);
      return {out, h, c};
    }
    using Run = std::tuple<Tensor, Tensor> (*)(const Tensor&, const Tensor&, at::TensorList, bool, int64_t, double, bool,
                                               bool, bool);
    const Run run = kind == Cell::kGru ? Run(at::gru) : kind == Cell::kTanh ? Run(at::rnn_tanh) : Run(at::rnn_relu);
    auto [out, h] = run(input, hidden, weights, biases, layers, 0.0, true, two_ways, batch_first);
    return {out, h};
  }
};
void recurrent(Stack& s) {
  const std::vector<Tensor> found = Recurrent::of(s, 6).forward();
  s = Stack(found.begin(), found.end());
}
void recurrent_stand_in(Stack& s) {
  const Recurrent r = Recurrent::of(s, 6);
  const auto& in = r.input;
  const int64_t ways = r.two_ways ? 2 : 1, width = r.hidden.size(2);
  const int64_t steps = in.size(r.batch_first ? 1 : 0), rows = in.size(r.batch_first ? 0 : 1);
  Tensor out = at::empty({steps, rows, width * ways}, in.options());
  if (r.batch_first) out.transpose_(0, 1);
  const Tensor cell = r.kind == Cell::kLstm ? at::empty_like(r.cell) : at::empty({0}, in.options());
  const Tensor reserve = at::empty({4 * out.numel()}, in.options().dtype(at::kByte));
  int64_t count = 0;
  for (const Tensor& each : r.weights) count += each.numel();
  const Tensor weights = tensor(s, 3).defined() ? tensor(s, 3) : at::empty({count}, in.options());
  s = {out, at::empty_like(r.hidden), cell, reserve, weights};
}
void recurrent_backward(Stack& s) {
  Recurrent r = Recurrent::of(s, 10);
  const WithAutograd on;
  std::vector<Tensor*> places = {&r.input, &r.hidden};
  if (r.kind == Cell::kLstm) places.push_back(&r.cell);
  for (Tensor& each : r.weights) places.push_back(&each);
  std::vector<Tensor> inputs;
  for (Tensor* each : places) inputs.push_back(*each = each->detach().requires_grad_());
  const std::vector<Tensor> found = r.forward();
  std::vector<Tensor> outputs, gradients;
  for (size_t i = 0; i < found.size(); ++i)
    if (const Tensor given = tensor(s, 7 + i); given.defined()) {
      outputs.push_back(found[i]);
      gradients.push_back(given);
    }
  auto made = torch::autograd::grad(outputs, inputs, gradients, std::nullopt, false, true);
  for (size_t i = 0; i < made.size(); ++i)
    if (!made[i].defined()) made[i] = at::zeros_like(inputs[i]);
  const size_t states = r.kind == Cell::kLstm ? 3 : 2;
  const std::vector<Tensor> weights(made.begin() + static_cast<ptrdiff_t>(states), made.end());
  s = {made[0], made[1], states == 3 ? made[2] : Tensor(), c10::List<Tensor>(weights)};
}
void recurrent_backward_stand_in(Stack& s) {
  c10::List<Tensor> weights;
  for (const Tensor& each : s[1].toTensorVector()) weights.push_back(at::empty_like(each));
  const Tensor cell = tensor(s, 5);
  s = {at::empty_like(tensor(s, 0)), at::empty_like(tensor(s, 4)), cell.defined() ? at::empty_like(cell) : Tensor(), weights};
}
void flattened_stand_in(Stack& s) {  // the parameters are not moved
  int64_t count = 0;
  const std::vector<Tensor> weights = s[0].toTensorVector();
  for (const Tensor& each : weights) count += each.numel();
  s = {at::empty({count}, weights.front().options())};
}

const std::map<std::string, Function> kTwins = {
    {"aten::cudnn_batch_norm", batch_norm},
    {"aten::cudnn_batch_norm_backward", batch_norm_backward},
    {"aten::_fused_rms_norm", rms_norm},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
    {"aten::native_dropout", dropout},
    {"aten::_scaled_dot_product_efficient_attention", efficient},
    {"aten::_scaled_dot_product_efficient_attention_backward", efficient_backward},
    {"aten::_scaled_dot_product_flash_attention", flash},
    {"aten::_scaled_dot_product_flash_attention_backward", flash_backward},
    {"aten::_scaled_dot_product_cudnn_attention", cudnn},
    {"aten::_scaled_dot_product_cudnn_attention_backward", cudnn_backward},
    {"aten::_cudnn_rnn", recurrent},
    {"aten::_cudnn_rnn_backward", recurrent_backward},
};
const std::map<std::string, Function> kStandIns = {
    {"aten::_scaled_dot_product_cudnn_attention", cudnn_stand_in},
    {"aten::_scaled_dot_product_cudnn_attention_backward", cudnn_backward_stand_in},
    {"aten::_cudnn_rnn", recurrent_stand_in},
    {"aten::_cudnn_rnn_backward", recurrent_backward_stand_in},
    {"aten::_cudnn_rnn_flatten_weight", flattened_stand_in},
};
// Ops that have no CUDA kernel of their own and do more than the ops that they call.
const std::set<std::string> kComposed = {"aten::copy_", "aten::convolution", "aten::convolution_backward",
                                         "aten::_foreach_copy_"};
const std::set<std::string> kByValue = {"aten::nonzero",
                                        "aten::masked_select",
                                        "aten::_unique2",
                                        "aten::unique_dim",
                                        "aten::unique_consecutive",
                                        "aten::repeat_interleave.Tensor",
                                        "aten::bincount",
                                        "aten::equal"};
// Ops that only copy, or do not depend on contents.
const std::set<std::string> kReal = {"aten::_local_scalar_dense",
                                     "aten::record_stream",
                                     "aten::is_set_to",
                                     "aten::is_pinned",
                                     "aten::_pin_memory",
                                     "aten::set_",
                                     "aten::resize_",
                                     "aten::resize_as_",
                                     "aten::_assert_async",
                                     "aten::_cudnn_init_dropout_state",
                                     "aten::_efficientzerotensor",
                                     "aten::_copy_from",
                                     "aten::_copy_from_and_resize",
                                     "aten::_has_compatible_shallow_copy_type",
                                     "aten::_sync"};
bool is_real(const std::string& name) {
  if (kReal.count(name) != 0) return true;
  for (const char* each : {"aten::empty", "aten::new_empty", "aten::_resize", "aten::_to_sparse", "aten::_sparse", "aten::_cslt"})
    if (begins(name, each)) return true;
  return false;
}
bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& each : schema.returns())
    if (each.alias_info() != nullptr && !each.alias_info()->isWrite()) return true;
  return schema.returns().empty() && schema.arguments().empty();
}

std::unique_ptr<Entry> entry_of(const c10::OperatorHandle& op) {
  const std::string& plain = op.operator_name().name;
  const std::string name = full_name(op.operator_name());
  if (!begins(plain, "aten::") || is_real(plain) || is_view(op.schema())) return nullptr;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) && kComposed.count(name) == 0) return nullptr;
  const auto twin = kTwins.find(name), stand_in = kStandIns.find(name);
  const bool computes = twin != kTwins.end() || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  if (stand_in == kStandIns.end() && !stub::settings().numbers) return nullptr;
  auto made = std::unique_ptr<Entry>(
      new Entry{op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), std::nullopt, {}, {}, false, false, 0, 0});
  if (twin != kTwins.end())
    made->twin = twin->second;
  else if (computes)
    made->cpu = op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  if (stand_in != kStandIns.end()) made->stand_in = stand_in->second;
  made->unknown = !computes && stand_in == kStandIns.end();
  made->by_value = kByValue.count(name) != 0;
  made->arguments = op.schema().arguments().size();
  made->returns = op.schema().returns().size();
  return made;
}

}  // namespace

// Registers itself before the CUDA ops; returns their number. Without numbers, only before ops with a device
// replacement.
STUB_EXPORT int replay_install() {
  static auto* const library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static int count = 0;
  if (count != 0) return count;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& each : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(each);
    if (!op) continue;
    auto entry = entry_of(*op);
    if (!entry) continue;
    const std::string name = full_name(each);
    entries()[name] = std::move(entry);
    library->impl(name.c_str() + std::string("aten::").size(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    ++count;
  }
  return count;
}
// While paused, ops of this thread run unchanged and are not computed.
STUB_EXPORT void replay_pause(int on) { within = on ? Within::kOp : Within::kNothing; }
STUB_EXPORT uint64_t replay_computed() { return computed; }
STUB_EXPORT uint64_t replay_failed() { return failed; }
