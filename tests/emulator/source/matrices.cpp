// mma.sync, and helpers for wgmma: element types and operands in registers.
#include "instructions.hpp"
#include "product.hpp"

namespace emulator {

int element_bytes(ElementType type) { return type == TF32 ? 4 : type == BF16 || type == F16 ? 2 : 1; }

float decode(u32 bits, ElementType type) {
  switch (type) {
  case BF16: return from_bf16(bits);
  case F16: return from_f16(bits);
  case TF32: return std::bit_cast<float>(bits & ~0x1FFFu);
  case E4M3: return e4m3.decode(bits);
  default: return e5m2.decode(bits);
  }
}

// Calls f(index, value) for the elements of a register of a lane.
template <class F> static void each_element(u32 bits, ElementType type, F f) {
  const int size = element_bytes(type);
  for (int e = 0; e < 4 / size; e++) f(e, decode(size == 4 ? bits : bits >> (8 * size * e) & ((1u << 8 * size) - 1), type));
}

void read_fragment_a(Warp& w, const Instruction& I, int first, int operands, float* a) {
  const int together = 4 / element_bytes(I.type);
  for (int i = 0; i < operands; i++)
    for (int l = 0; l < 32; l++) {
      const int row = l / 4 + 8 * (i & 1), k = (i >> 1) * 4 * together + l % 4 * together;
      each_element(words(w, I, first + i)[l], I.type, [&](int e, float value) { a[row * I.k + k + e] = value; });
    }
}
static void read_fragment_b(Warp& w, const Instruction& I, int first, int operands, float* b) {
  const int together = 4 / element_bytes(I.type);
  for (int i = 0; i < operands; i++)
    for (int l = 0; l < 32; l++) {
      const int k = i * 4 * together + l % 4 * together;
      each_element(words(w, I, first + i)[l], I.type, [&](int e, float value) { b[(k + e) * 8 + l / 4] = value; });
    }
}

void mma(Warp& w, Instruction& I, u32 mask) {
  require_all_lanes(w, I, mask);
  const int first_a = I.destinations, first_b = first_a + I.a_operands, first_c = first_b + I.b_operands;
  float a[16 * 32], b[32 * 8], c[16 * 8];
  read_fragment_a(w, I, first_a, I.a_operands, a);
  read_fragment_b(w, I, first_b, I.b_operands, b);
  auto at = [&](int lane, int i) -> float& { return c[accumulator_row(lane, i) * 8 + accumulator_column(lane, i)]; };
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++)
      at(l, i) = I.half_accumulator ? from_f16(words(w, I, first_c + i / 2)[l] >> 16 * (i & 1))
                                    : std::bit_cast<float>(words(w, I, first_c + i)[l]);
  multiply<8>(a, b, c, I.k, 8);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++)
      if (!I.half_accumulator) words(w, I, i)[l] = std::bit_cast<u32>(at(l, i));
      else if (i % 2 == 0) words(w, I, i / 2)[l] = to_f16(at(l, i)) | to_f16(at(l, i + 1)) << 16;
}

}  // namespace emulator
