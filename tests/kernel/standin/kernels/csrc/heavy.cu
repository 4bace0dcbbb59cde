#include "instantiations.h"
#include "ops.h"
#include "rig_shared.h"

constexpr int added = instantiated<300>() > 0 ? 7 : 0;

__global__ void heavy_kernel(float* out, const float* in, int64_t count) {
  int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (at < count) out[at] = in[at] + added;
}

void heavy(float* out, const float* in, int64_t count) {
  heavy_kernel<<<(count + threads_per_block - 1) / threads_per_block, threads_per_block>>>(out, in, count);
}
