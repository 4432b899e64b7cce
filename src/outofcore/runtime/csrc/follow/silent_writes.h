// Arguments that operators write although their schemas do not declare it. Without an entry such a write is lost: the
// storage is evicted as unchanged. tests/torch_cpu/silent_writes.py finds entries that run on a CPU. Names cover all
// overloads, for torch 2.11 to 2.13. Arguments written only in some modes, such as training, always count as written.

#pragma once

#include <cstddef>
#include <string_view>

namespace follow {

struct SilentWrite {
  std::string_view op, argument;
};

inline constexpr SilentWrite kSilentWrites[] = {
    {"aten::native_batch_norm", "running_mean"},
    {"aten::native_batch_norm", "running_var"},
    {"aten::cudnn_batch_norm", "running_mean"},
    {"aten::cudnn_batch_norm", "running_var"},
    {"aten::miopen_batch_norm", "running_mean"},
    {"aten::miopen_batch_norm", "running_var"},
    {"aten::batch_norm_gather_stats", "running_mean"},
    {"aten::batch_norm_gather_stats", "running_var"},
    {"aten::batch_norm_gather_stats_with_counts", "running_mean"},
    {"aten::batch_norm_gather_stats_with_counts", "running_var"},
    {"aten::batch_norm_update_stats", "running_mean"},
    {"aten::batch_norm_update_stats", "running_var"},
    {"aten::mkldnn_rnn_layer_backward", "workspace"},
    {"aten::_cudnn_rnn", "dropout_state"},
    {"aten::_cudnn_rnn_backward", "reserve"},
    {"aten::miopen_rnn", "dropout_state"},
    {"aten::miopen_rnn_backward", "reserve"},
    {"aten::_copy_from", "dst"},
    {"aten::_copy_from_and_resize", "dst"},
    {"quantized::relu6", "qx"},
    {"quantized::conv2d_add", "qaccum"},
    {"quantized::conv2d_add_relu", "qaccum"},
    {"onednn::qlinear_pointwise", "other"},
    {"_c10d_functional::irecv", "tensor"},
    {"_c10d_functional::batch_p2p_ops", "tensors"},
};

// `place`: index of the argument.
inline bool writes_silently(std::string_view op, std::string_view argument, size_t place) {
  // Collectives such as c10d::allreduce_ write their first argument.
  if (op.substr(0, 6) == "c10d::" && op.back() == '_') return place == 0;
  for (const SilentWrite& entry : kSilentWrites)
    if (entry.op == op && entry.argument == argument) return true;
  return false;
}

}  // namespace follow
