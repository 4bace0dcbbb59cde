#pragma once
#define INNER_BIAS 2.0f
