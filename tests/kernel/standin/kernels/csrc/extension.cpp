// The only file with torch's headers: they cost most of a minute of processor time.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#ifdef RIG_KERNEL_NUMA
#include <numa.h>  // a header package of the distribution
#endif

#include "ops.h"

namespace {
at::Tensor scale_op(const at::Tensor& in, double factor) {
  at::Tensor out = at::empty_like(in);
  scale(out.data_ptr<float>(), in.const_data_ptr<float>(), float(factor), in.numel());
  return out;
}

at::Tensor row_sum_op(const at::Tensor& in) {
  at::Tensor out = at::empty({in.size(0)}, in.options());
  row_sum(out.data_ptr<float>(), in.const_data_ptr<float>(), in.size(0), in.size(1));
  return out;
}

template <void (*kernel)(float*, const float*, int64_t)>
at::Tensor elementwise(const at::Tensor& in) {
  at::Tensor out = at::empty_like(in);
  kernel(out.data_ptr<float>(), in.const_data_ptr<float>(), in.numel());
  return out;
}
}  // namespace

// From libcuda, which a machine without a driver lacks: importing needs it, as the real library does.
extern "C" {
int cuInit(unsigned flags);
int (*rig_kernel_driver)(unsigned) = &cuInit;
}

TORCH_LIBRARY(rig_kernel, library) {
  library.def("scale(Tensor input, float factor) -> Tensor");
  library.def("row_sum(Tensor input) -> Tensor");
  library.def("relu(Tensor input) -> Tensor");
  library.def("shift(Tensor input) -> Tensor");
  library.def("huge(Tensor input) -> Tensor");
  library.def("heavy(Tensor input) -> Tensor");
}

TORCH_LIBRARY_IMPL(rig_kernel, CUDA, library) {
  library.impl("scale", scale_op);
  library.impl("row_sum", row_sum_op);
  library.impl("relu", elementwise<relu>);
  library.impl("shift", elementwise<shift>);
  library.impl("heavy", elementwise<heavy>);
  library.impl("huge", elementwise<huge>);
}
