// So many instantiations need so much memory to compile, in the host's compiler and once for each architecture:
// 220 x 220 about 1 GiB, 440 x 440 about 3.
#pragma once
#include <utility>

// Percent of the side: the tests that are about something else take little.
#ifndef HEAVY_PERCENT
#define HEAVY_PERCENT 100
#endif

template <int row, int column>
struct cell {
  static constexpr int value = (row * 31 + column * 17) % 5 + sizeof(char[row + 1]) % 2;
};

template <int row, int... column>
constexpr int row_value(std::integer_sequence<int, column...>) {
  return (cell<row, column>::value + ... + 0);
}

template <int side, int... row>
constexpr int total(std::integer_sequence<int, row...>) {
  return (row_value<row>(std::make_integer_sequence<int, side>()) + ... + 0);
}

template <int full>
constexpr int instantiated() {
  constexpr int side = full * HEAVY_PERCENT / 100;
  return total<side>(std::make_integer_sequence<int, side>());
}
