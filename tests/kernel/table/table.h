#pragma once
#define TABLE_BIAS 2.0f
