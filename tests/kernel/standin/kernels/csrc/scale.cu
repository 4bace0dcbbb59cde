#include "mathlib.h"
#include "ops.h"
#include "rig_shared.h"

__global__ void scale_kernel(float* out, const float* in, float factor, int64_t count) {
  int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (at < count) out[at] = scaled(in[at], factor);
}

void scale(float* out, const float* in, float factor, int64_t count) {
  scale_kernel<<<(count + threads_per_block - 1) / threads_per_block, threads_per_block>>>(out, in, factor, count);
}
