// Conversions of bf16, f16, e4m3, e5m2 and tf32, rounded as on hardware.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include "types.hpp"

namespace emulator {

constexpr u32 HALF_NAN = 0x7FFF;  // NaN after a conversion

inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }  // .ftz

inline float from_bf16(u32 bits) { return std::bit_cast<float>(bits << 16); }
inline u32 to_bf16(float value) {
  u32 bits = std::bit_cast<u32>(value);
  if (std::isnan(value)) return HALF_NAN;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float from_f16(u32 bits) { return (float)std::bit_cast<_Float16>((u16)bits); }
template <class T> inline u32 to_f16(T value) {
  return std::isnan(value) ? HALF_NAN : std::bit_cast<u16>((_Float16)value);
}

// An 8-bit float with a sign bit. The values of the codes 0..largest ascend.
struct SmallFloat {
  std::array<float, 256> values;
  u32 largest;

  SmallFloat(int exponent_bits, int fraction_bits, u32 largest_finite, bool has_infinity) : largest(largest_finite) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (u32 i = 0; i < 256; i++) {
      const u32 magnitude = i & 0x7F, exponent = magnitude >> fraction_bits, fraction = magnitude & ((1 << fraction_bits) - 1);
      float value = exponent ? std::ldexp(fraction | 1u << fraction_bits, (int)exponent - bias - fraction_bits)
                             : std::ldexp(fraction, 1 - bias - fraction_bits);
      if (magnitude > largest) value = has_infinity && !fraction ? INFINITY : NAN;
      values[i] = i & 0x80 ? -value : value;
    }
  }
  float decode(u32 bits) const { return values[bits & 0xFF]; }
  u32 encode(float value) const {  // rounds to nearest even, saturates
    if (std::isnan(value)) return 0x7F;
    const u32 sign = std::signbit(value) ? 0x80 : 0;
    const float x = std::fabs(value);
    if (x >= values[largest]) return sign | largest;
    const u32 above = std::upper_bound(values.begin(), values.begin() + largest + 1, x) - values.begin(), below = above - 1;
    const float down = x - values[below], up = values[above] - x;
    return sign | (down < up || (down == up && below % 2 == 0) ? below : above);
  }
};
inline const SmallFloat e4m3(4, 3, 0x7E, false), e5m2(5, 2, 0x7B, true);

// Adds `half` to the 13 dropped bits: 0x1000 rounds ties away from zero.
inline u32 round_to_tf32(float value, u32 half) {
  const u32 bits = std::bit_cast<u32>(value);
  return std::isfinite(value) ? (bits + half) & ~0x1FFFu : bits;
}
inline u32 to_tf32_away(float value) { return round_to_tf32(value, 0x1000); }
inline u32 to_tf32_even(float value) { return round_to_tf32(value, 0xFFF + (std::bit_cast<u32>(value) >> 13 & 1)); }

template <class T> inline T to_integer(double value) {  // saturates; NaN becomes 0
  constexpr T lowest = std::numeric_limits<T>::min(), highest = std::numeric_limits<T>::max();
  if (std::isnan(value)) return 0;
  return value <= (double)lowest ? lowest : value >= (double)highest ? highest : (T)value;
}

}  // namespace emulator
