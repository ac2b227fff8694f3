// Matrix products with 16 rows.
#pragma once
#include "numbers.hpp"

namespace emulator {

// c [16, columns] += a [16, k] b [k, columns]: exact products, added in fp32 one after another.
template <int columns> void multiply(const float* a, const float* b, float* c, int k, int stride) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < k; j++)
      for (int n = 0; n < columns; n++) c[i * stride + n] += a[i * k + j] * b[j * stride + n];
}

// The same with short sums, as sm_90 multiplies 8-bit floats: the products of one instruction and the accumulator are
// aligned to the largest of them, and truncated to `bits` significant bits.
inline void multiply_short(const float* a, const float* b, float* c, int k, int columns, int stride, int bits) {
  for (int i = 0; i < 16; i++)
    for (int n = 0; n < columns; n++) {
      float terms[33], largest = 0;
      terms[k] = c[i * stride + n];
      for (int j = 0; j < k; j++) terms[j] = a[i * k + j] * b[j * stride + n];
      bool finite = true;
      for (int j = 0; j <= k; j++) largest = std::max(largest, std::fabs(terms[j])), finite &= std::isfinite(terms[j]);
      double sum = 0;
      int exponent = 0;
      std::frexp(largest, &exponent);
      for (int j = 0; j <= k; j++)
        sum += finite ? std::ldexp(std::trunc(std::ldexp(terms[j], bits - exponent)), exponent - bits) : terms[j];
      c[i * stride + n] = sum;
    }
}

}  // namespace emulator
