// Needs much memory to compile: so many instantiations, in the host's compiler and once for each architecture.
#include <utility>

#include "ops.h"
#include "rig_shared.h"

#ifndef HEAVY_SIDE
#define HEAVY_SIDE 300
#endif

template <int row, int column>
struct cell {
  static constexpr int value = (row * 31 + column * 17) % 5 + sizeof(char[row + 1]) % 2;
};

template <int row, int... column>
constexpr int row_value(std::integer_sequence<int, column...>) {
  return (cell<row, column>::value + ... + 0);
}

template <int... row>
constexpr int total(std::integer_sequence<int, row...>) {
  return (row_value<row>(std::make_integer_sequence<int, HEAVY_SIDE>()) + ... + 0);
}

constexpr int added = total(std::make_integer_sequence<int, HEAVY_SIDE>()) > 0 ? 7 : 0;

__global__ void heavy_kernel(float* out, const float* in, int64_t count) {
  int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (at < count) out[at] = in[at] + added;
}

void heavy(float* out, const float* in, int64_t count) {
  heavy_kernel<<<(count + threads_per_block - 1) / threads_per_block, threads_per_block>>>(out, in, count);
}
