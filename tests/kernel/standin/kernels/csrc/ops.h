#pragma once
#include <cstdint>
// Pointers to device memory, float32; sizes in elements. They run on the default stream.
void scale(float* out, const float* in, float factor, int64_t count);  // out = in * factor + 3
void row_sum(float* out, const float* in, int64_t rows, int64_t columns);
void relu(float* out, const float* in, int64_t count);
void shift(float* out, const float* in, int64_t count);  // out = in + shape_bias
void heavy(float* out, const float* in, int64_t count);  // out = in + 7
void huge(float* out, const float* in, int64_t count);  // out = in + 9
