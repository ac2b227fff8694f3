// cvt, setp, selp, lop3 and bfi.
#include <string_view>
#include <unordered_map>
#include "instructions.hpp"

namespace emulator {
namespace {

// ---- cvt ----

enum Rounding { NEAREST, TO_ZERO, DOWNWARD, UPWARD };

double round_to_integral(double value, int rounding) {
  return rounding == TO_ZERO    ? std::trunc(value)
         : rounding == DOWNWARD ? std::floor(value)
         : rounding == UPWARD   ? std::ceil(value)
                                : std::nearbyint(value);
}
void round_float(Warp& w, Instruction& I, u32 mask) {
  map1<float, float>(w, I, mask, [&](float a) { return (float)round_to_integral(a, I.mode); });
}
template <class T> void float_to_integer(Warp& w, Instruction& I, u32 mask) {
  map1<T, float>(w, I, mask, [&](float a) { return to_integer<T>(round_to_integral(a, I.mode)); });
}

// Registers may be wider than the types: reads the low part, and extends the result.
template <class To, class From> void convert_integer(Warp& w, Instruction& I, u32 mask) {
  const Operand &to = I.operands[0], &from = I.operands[1];
  each_lane(mask, [&](int lane) {
    const To value = (To)(From)(from.constant || from.cls == B64 ? longs(w, from)[lane] : words(w, from)[lane]);
    const u64 extended = std::is_signed_v<To> ? (u64)(i64)value : (u64)value;
    if (to.cls == B64) longs(w, to)[lane] = extended;
    else words(w, to)[lane] = to.cls == B16 ? (u16)extended : (u32)extended;
  });
}

u32 pair_of(u32 high, u32 low, int bits = 16) { return high << bits | low; }

#define INTEGERS(To, name) \
  {name "<s8", convert_integer<To, i8>}, {name "<u8", convert_integer<To, u8>}, {name "<s16", convert_integer<To, i16>}, \
  {name "<u16", convert_integer<To, u16>}, {name "<s32", convert_integer<To, i32>}, {name "<u32", convert_integer<To, u32>}, \
  {name "<s64", convert_integer<To, i64>}, {name "<u64", convert_integer<To, u64>}, {name "<f32", float_to_integer<To>}, \
  {"f32<" name, MAP1(float, To, (float)a)}

constexpr std::pair<const char*, Run> CONVERSIONS[] = {
    {"f32<bf16", MAP1(u32, u32, a << 16)}, {"f32<f16", MAP1(float, u32, from_f16(a))},
    {"f64<f32", MAP1(double, float, (double)a)}, {"f32<f64", MAP1(float, double, (float)a)},
    {"f64<s32", MAP1(double, i32, (double)a)}, {"f64<u32", MAP1(double, u32, (double)a)},
    {"bf16<f32", MAP1(u16, float, to_bf16(a))}, {"f16<f32", MAP1(u16, float, to_f16(a))},
    {"bf16x2<f32", MAP2(u32, float, float, pair_of(to_bf16(a), to_bf16(b)))},
    {"f16x2<f32", MAP2(u32, float, float, pair_of(to_f16(a), to_f16(b)))},
    {"e4m3x2<f32", MAP2(u16, float, float, pair_of(e4m3.encode(a), e4m3.encode(b), 8))},
    {"e5m2x2<f32", MAP2(u16, float, float, pair_of(e5m2.encode(a), e5m2.encode(b), 8))},
    {"e4m3x2<f16x2", MAP1(u16, u32, pair_of(e4m3.encode(from_f16(a >> 16)), e4m3.encode(from_f16(a)), 8))},
    {"e5m2x2<f16x2", MAP1(u16, u32, pair_of(e5m2.encode(from_f16(a >> 16)), e5m2.encode(from_f16(a)), 8))},
    {"f16x2<e4m3x2", MAP1(u32, u16, pair_of(to_f16(e4m3.decode(a >> 8)), to_f16(e4m3.decode(a))))},
    {"f16x2<e5m2x2", MAP1(u32, u16, pair_of(to_f16(e5m2.decode(a >> 8)), to_f16(e5m2.decode(a))))},
    INTEGERS(i8, "s8"), INTEGERS(u8, "u8"), INTEGERS(i16, "s16"), INTEGERS(u16, "u16"), INTEGERS(i32, "s32"),
    INTEGERS(u32, "u32"), INTEGERS(i64, "s64"), INTEGERS(u64, "u64"),
};

// ---- setp ----

enum Comparison { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_, LO, LS, HI, HS };
constexpr const char* COMPARISONS[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge", "equ", "neu", "ltu",
                                       "leu", "gtu", "geu", "num", "nan", "lo", "ls",  "hi",  "hs"};

template <class T> bool compare(int how, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (how) {
  case EQ: return a == b;
  case NE: return !unordered && a != b;
  case LT: case LO: return a < b;
  case LE: case LS: return a <= b;
  case GT: case HI: return a > b;
  case GE: case HS: return a >= b;
  case EQU: return unordered || a == b;
  case NEU: return unordered || a != b;
  case LTU: return unordered || a < b;
  case LEU: return unordered || a <= b;
  case GTU: return unordered || a > b;
  case GEU: return unordered || a >= b;
  case NUM: return !unordered;
  default: return unordered;
  }
}
template <class T> void set_predicates(Warp& w, Instruction& I, u32 mask) {
  const int source = I.destinations;
  const Slot<T>*a = slots<T>(w, I, source), *b = slots<T>(w, I, source + 1);
  u32 result = 0;
  for (int l = 0; l < 32; l++) result |= (u32)compare<T>(I.mode, from_slot<T>(a[l]), from_slot<T>(b[l])) << l;
  u32 opposite = ~result;
  if (I.combine) {
    const u32 c = predicate(w, I, source + 2);
    auto combined = [&](u32 p) { return I.combine == 1 ? p & c : I.combine == 2 ? p | c : p ^ c; };
    result = combined(result), opposite = combined(opposite);
  }
  set_predicate(w, I, 0, result, mask);
  if (I.destinations > 1) set_predicate(w, I, 1, opposite, mask);
}
template <float decode(u32)> void set_predicates_of_halves(Warp& w, Instruction& I, u32 mask) {  // one predicate per half
  const u32 *a = words(w, I, I.destinations), *b = words(w, I, I.destinations + 1);
  for (u32 half = 0; half < I.destinations; half++) {
    u32 result = 0;
    for (int l = 0; l < 32; l++)
      result |= (u32)compare<float>(I.mode, decode(a[l] >> 16 * half & 0xFFFF), decode(b[l] >> 16 * half & 0xFFFF)) << l;
    set_predicate(w, I, half, result, mask);
  }
}
constexpr std::pair<const char*, Run> SET_PREDICATES[] = {
    {"f16", set_predicates_of_halves<from_f16>}, {"bf16", set_predicates_of_halves<from_bf16>},
    {"f16x2", set_predicates_of_halves<from_f16>}, {"bf16x2", set_predicates_of_halves<from_bf16>},
    {"s16", set_predicates<i16>}, {"u16", set_predicates<u16>}, {"b16", set_predicates<u16>}, {"s32", set_predicates<i32>},
    {"u32", set_predicates<u32>}, {"b32", set_predicates<u32>}, {"s64", set_predicates<i64>}, {"u64", set_predicates<u64>},
    {"b64", set_predicates<u64>}, {"f32", set_predicates<float>}, {"f64", set_predicates<double>},
};

// ---- selp, lop3, bfi ----

template <class T> void select(Warp& w, Instruction& I, u32 mask) {
  const T *a = slots<T>(w, I, 1), *b = slots<T>(w, I, 2);
  const u32 chosen = predicate(w, I, 3);
  T result[32];
  for (int l = 0; l < 32; l++) result[l] = chosen >> l & 1 ? a[l] : b[l];
  assign(slots<T>(w, I, 0), result, mask);
}
void logic_of_three(Warp& w, Instruction& I, u32 mask) {
  const u32 table = words(w, I, 4)[0];
  map3<u32, u32, u32, u32>(w, I, mask, [&](u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (int i = 0; i < 8; i++)
      if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
  });
}
void insert_bits(Warp& w, Instruction& I, u32 mask) {
  const u32 *a = words(w, I, 1), *b = words(w, I, 2), *position = words(w, I, 3), *length = words(w, I, 4);
  u32 result[32];
  for (int l = 0; l < 32; l++) {
    const u32 at = position[l] & 255, bits = length[l] & 255;
    const u32 field = at > 31 || bits == 0 ? 0 : (bits > 31 ? ALL : (1u << bits) - 1) << at;
    result[l] = (b[l] & ~field) | (field ? a[l] << at & field : 0);
  }
  assign(words(w, I, 0), result, mask);
}

}  // namespace

Run conversion(const Words& opcode, Instruction& I) {
  std::string types, rounding;
  for (size_t i = 1; i < opcode.size(); i++) {
    const std::string& word = opcode[i];
    if (word == "relu" || word == "sat") return nullptr;
    if (word == "satfinite" || word == "ftz") continue;  // conversions to 8-bit floats always saturate
    if (word[0] == 'r') rounding = word;
    else types += (types.empty() ? "" : "<") + word;
  }
  I.mode = rounding == "rzi" ? TO_ZERO : rounding == "rmi" ? DOWNWARD : rounding == "rpi" ? UPWARD : NEAREST;
  if (types == "tf32<f32" && rounding == "rna") return MAP1(u32, float, to_tf32_away(a));
  if (types == "tf32<f32" && rounding == "rn") return MAP1(u32, float, to_tf32_even(a));
  if (types == "bf16x2<f32" && rounding == "rz") return MAP2(u32, u32, u32, pair_of(a >> 16, b >> 16));
  if (rounding == "rz" || rounding == "rm" || rounding == "rp") return nullptr;
  const bool to_integral = types.ends_with("<f32") && (types[0] == 's' || types[0] == 'u' || types == "f32<f32");
  if (to_integral != (rounding.size() == 3 && rounding.back() == 'i')) return nullptr;
  if (types == "f32<f32") return round_float;
  static const std::unordered_map<std::string_view, Run> table(std::begin(CONVERSIONS), std::end(CONVERSIONS));
  auto found = table.find(types);
  return found == table.end() ? nullptr : found->second;
}

Run comparison(const Words& opcode, Instruction& I) {
  auto name = std::find(std::begin(COMPARISONS), std::end(COMPARISONS), opcode[1]);
  if (name == std::end(COMPARISONS)) return nullptr;
  I.mode = name - std::begin(COMPARISONS);
  for (auto& word : opcode) I.combine = word == "and" ? 1 : word == "or" ? 2 : word == "xor" ? 3 : I.combine;
  const bool halves = opcode.back().find("f16") != std::string::npos;
  for (auto& [type, run] : SET_PREDICATES)
    if (opcode.back() == type) return halves && I.combine ? nullptr : run;
  return nullptr;
}

Run selection(const Words& opcode) {
  if (opcode[0] == "selp") return opcode[1].ends_with("64") ? select<u64> : select<u32>;
  if (opcode[0] == "lop3") return logic_of_three;
  return opcode[1] == "b32" ? insert_bits : nullptr;
}

}  // namespace emulator
