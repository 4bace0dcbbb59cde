#pragma once
constexpr int threads_per_block = 256;
