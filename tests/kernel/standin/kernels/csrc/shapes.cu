#include <shapes.h>

#include "ops.h"
#include "rig_shared.h"

__global__ void shift_kernel(float* out, const float* in, int64_t count) {
  int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (at < count) out[at] = in[at] + shape_bias;
}

void shift(float* out, const float* in, int64_t count) {
  shift_kernel<<<(count + threads_per_block - 1) / threads_per_block, threads_per_block>>>(out, in, count);
}
