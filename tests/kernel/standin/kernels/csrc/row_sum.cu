#include "ops.h"
#include "rig_shared.h"

__global__ void row_sum_kernel(float* out, const float* in, int64_t columns) {
  __shared__ float partial[threads_per_block];
  float sum = 0;
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) sum += in[blockIdx.x * columns + column];
  partial[threadIdx.x] = sum;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

void row_sum(float* out, const float* in, int64_t rows, int64_t columns) {
  row_sum_kernel<<<rows, threads_per_block>>>(out, in, columns);
}
