#pragma once
#include "generated.h"
__host__ __device__ inline float scaled(float value, float factor) { return value * factor + MATHLIB_FACTOR; }
