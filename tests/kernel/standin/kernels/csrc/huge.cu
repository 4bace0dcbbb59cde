#include "instantiations.h"
#include "ops.h"
#include "rig_shared.h"

constexpr int added = instantiated<500>() > 0 ? 9 : 0;

__global__ void huge_kernel(float* out, const float* in, int64_t count) {
  int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (at < count) out[at] = in[at] + added;
}

void huge(float* out, const float* in, int64_t count) {
  huge_kernel<<<(count + threads_per_block - 1) / threads_per_block, threads_per_block>>>(out, in, count);
}
