#pragma once
#include "inner.h"
#include "table.h"
constexpr float shape_bias = INNER_BIAS - TABLE_BIAS;  // 0
