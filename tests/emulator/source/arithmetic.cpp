// Arithmetic and logic: one function for each opcode and number of inputs.
#include <map>
#include <string_view>
#include "instructions.hpp"

namespace emulator {
namespace {

template <class T> T divide(T a, T b) {  // by zero: all bits set
  if (b == 0) return (T)~(T)0;
  return std::is_signed_v<T> && b == (T)-1 ? (T)(0 - (std::make_unsigned_t<T>)a) : a / b;
}
template <class T> T remainder_of(T a, T b) { return b == 0 ? a : std::is_signed_v<T> && b == (T)-1 ? 0 : a % b; }
float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }
float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }

u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 select = selector >> 4 * i & 15, byte = bytes >> 8 * (select & 7) & 255;
    result |= (select & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * i;
  }
  return result;
}
template <class T> T extract_bits(T a, u32 position, u32 length) {
  constexpr u32 bits = sizeof(T) * 8;
  using U = std::make_unsigned_t<T>;
  position &= 255, length &= 255;
  if (length == 0) return 0;
  const u32 top = std::min(position + length - 1, bits - 1), kept = position < bits ? top - position + 1 : 0;
  const U value = position < bits ? (U)a >> position : 0;
  const U mask = kept >= bits ? ~(U)0 : ((U)1 << kept) - 1;
  const bool negative = std::is_signed_v<T> && ((U)a >> top & 1);
  return (T)((value & mask) | (negative ? ~mask : 0));
}
u32 reverse_bits(u32 a) {
  u32 result = 0;
  for (int i = 0; i < 32; i++) result |= (a >> i & 1) << (31 - i);
  return result;
}

// ---- packed formats ----

float low(u64 v) { return std::bit_cast<float>((u32)v); }
float high(u64 v) { return std::bit_cast<float>((u32)(v >> 32)); }
u64 two_floats(float l, float h) { return (u64)std::bit_cast<u32>(h) << 32 | std::bit_cast<u32>(l); }

struct Bf16 {
  static float from(u32 bits) { return from_bf16(bits & 0xFFFF); }
  static u32 to(double value) { return to_bf16((float)value); }
};
struct Fp16 {
  static float from(u32 bits) { return from_f16(bits); }
  static u32 to(double value) { return to_f16(value); }
};
double plus(float a, float b) { return (double)a + b; }
double minus(float a, float b) { return (double)a - b; }
double times(float a, float b) { return (double)a * b; }
double smaller(float a, float b) { return std::fmin(a, b); }
double larger(float a, float b) { return std::fmax(a, b); }

template <class Half, double operation(float, float)> u16 on_half(u16 a, u16 b) {
  return Half::to(operation(Half::from(a), Half::from(b)));
}
template <class Half, double operation(float, float)> u32 on_pair(u32 a, u32 b) {
  return on_half<Half, operation>(a, b) | (u32)on_half<Half, operation>(a >> 16, b >> 16) << 16;
}
template <class Half> u16 fused(u16 a, u16 b, u16 c) {
  return Half::to(std::fma((double)Half::from(a), (double)Half::from(b), (double)Half::from(c)));
}
template <class Half> u32 fused_pair(u32 a, u32 b, u32 c) {
  return fused<Half>(a, b, c) | (u32)fused<Half>(a >> 16, b >> 16, c >> 16) << 16;
}

// ---- shorthand for the table ----

struct Entry {
  const char* opcode;
  size_t inputs;
  Run run;
};
#define OF1(T, E) 1, MAP1(T, T, E)
#define OF2(T, E) 2, MAP2(T, T, T, E)
#define OF3(T, E) 3, MAP3(T, T, T, T, E)
#define BOTH_SIGNS(name, bits, ...) {name ".s" #bits, __VA_ARGS__}, {name ".u" #bits, __VA_ARGS__}
#define HALVES(name, suffix, Half, operation) \
  {name "." suffix, OF2(u16, (on_half<Half, operation>(a, b)))}, \
  {name "." suffix "x2", OF2(u32, (on_pair<Half, operation>(a, b)))}
#define HALF_TYPE(suffix, Half) \
  HALVES("add", suffix, Half, plus), HALVES("sub", suffix, Half, minus), HALVES("mul", suffix, Half, times), \
  HALVES("min", suffix, Half, smaller), HALVES("max", suffix, Half, larger), \
  {"fma." suffix, OF3(u16, fused<Half>(a, b, c))}, {"fma." suffix "x2", OF3(u32, fused_pair<Half>(a, b, c))}, \
  {"neg." suffix, OF1(u16, a ^ 0x8000)}, {"neg." suffix "x2", OF1(u32, a ^ 0x80008000)}, \
  {"abs." suffix, OF1(u16, a & 0x7FFF)}, {"abs." suffix "x2", OF1(u32, a & 0x7FFF7FFF)}, \
  {"add.f32." suffix, 2, MAP2(float, u32, float, Half::from(a) + b)}, \
  {"sub.f32." suffix, 2, MAP2(float, u32, float, Half::from(a) - b)}, \
  {"fma.f32." suffix, 3, MAP3(float, u32, u32, float, std::fma(Half::from(a), Half::from(b), c))}
#define WITH_FLUSH1(name, E) \
  {name ".f32", OF1(float, E)}, {name ".ftz.f32", OF1(float, [](float a) { return flush(E); }(flush(a)))}
#define WITH_FLUSH2(name, E) \
  {name ".f32", OF2(float, E)}, \
  {name ".ftz.f32", OF2(float, [](float a, float b) { return flush(E); }(flush(a), flush(b)))}
#define ON_PREDICATES(inputs, E) \
  inputs, [](Warp& w, Instruction& I, u32 mask) { \
    const u32 a = predicate(w, I, 1), b = predicate(w, I, I.operands.size() - 1); \
    (void)b; \
    set_predicate(w, I, 0, E, mask); \
  }

constexpr Entry TABLE[] = {
    // integers
    BOTH_SIGNS("add", 16, OF2(u16, a + b)), BOTH_SIGNS("add", 32, OF2(u32, a + b)),
    BOTH_SIGNS("add", 64, OF2(u64, a + b)),
    BOTH_SIGNS("sub", 16, OF2(u16, a - b)), BOTH_SIGNS("sub", 32, OF2(u32, a - b)),
    BOTH_SIGNS("sub", 64, OF2(u64, a - b)),
    BOTH_SIGNS("mul.lo", 16, OF2(u16, (u32)a * b)), BOTH_SIGNS("mul.lo", 32, OF2(u32, a * b)),
    BOTH_SIGNS("mul.lo", 64, OF2(u64, a * b)),
    {"mul.hi.u32", OF2(u32, (u64)a * b >> 32)}, {"mul.hi.s32", OF2(i32, (i64)a * b >> 32)},
    {"mul.hi.u64", OF2(u64, (unsigned __int128)a * b >> 64)}, {"mul.hi.s64", OF2(i64, (__int128)a * b >> 64)},
    {"mul.wide.s16", 2, MAP2(i32, i16, i16, (i32)a * b)}, {"mul.wide.u16", 2, MAP2(u32, u16, u16, (u32)a * b)},
    {"mul.wide.s32", 2, MAP2(i64, i32, i32, (i64)a * b)}, {"mul.wide.u32", 2, MAP2(u64, u32, u32, (u64)a * b)},
    BOTH_SIGNS("mad.lo", 32, OF3(u32, a * b + c)), BOTH_SIGNS("mad.lo", 64, OF3(u64, a * b + c)),
    {"mad.wide.s32", 3, MAP3(i64, i32, i32, i64, (i64)a * b + c)},
    {"mad.wide.u32", 3, MAP3(u64, u32, u32, u64, (u64)a * b + c)},
    {"div.s32", OF2(i32, divide(a, b))}, {"div.u32", OF2(u32, divide(a, b))},
    {"div.s64", OF2(i64, divide(a, b))}, {"div.u64", OF2(u64, divide(a, b))},
    {"rem.s32", OF2(i32, remainder_of(a, b))}, {"rem.u32", OF2(u32, remainder_of(a, b))},
    {"rem.s64", OF2(i64, remainder_of(a, b))}, {"rem.u64", OF2(u64, remainder_of(a, b))},
    {"min.s32", OF2(i32, std::min(a, b))}, {"min.u32", OF2(u32, std::min(a, b))},
    {"max.s32", OF2(i32, std::max(a, b))}, {"max.u32", OF2(u32, std::max(a, b))},
    {"min.s64", OF2(i64, std::min(a, b))}, {"min.u64", OF2(u64, std::min(a, b))},
    {"max.s64", OF2(i64, std::max(a, b))}, {"max.u64", OF2(u64, std::max(a, b))},
    {"neg.s16", OF1(u16, 0 - a)}, {"neg.s32", OF1(u32, 0 - a)}, {"neg.s64", OF1(u64, 0 - a)},
    {"abs.s32", OF1(u32, (i32)a < 0 ? 0 - a : a)}, {"abs.s64", OF1(u64, (i64)a < 0 ? 0 - a : a)},
    {"and.b16", OF2(u16, a & b)}, {"and.b32", OF2(u32, a & b)}, {"and.b64", OF2(u64, a & b)},
    {"or.b16", OF2(u16, a | b)}, {"or.b32", OF2(u32, a | b)}, {"or.b64", OF2(u64, a | b)},
    {"xor.b16", OF2(u16, a ^ b)}, {"xor.b32", OF2(u32, a ^ b)}, {"xor.b64", OF2(u64, a ^ b)},
    {"not.b16", OF1(u16, ~a)}, {"not.b32", OF1(u32, ~a)}, {"not.b64", OF1(u64, ~a)},
    {"shl.b16", 2, MAP2(u16, u16, u32, b > 15 ? 0 : a << b)}, {"shl.b32", OF2(u32, b > 31 ? 0 : a << b)},
    {"shl.b64", 2, MAP2(u64, u64, u32, b > 63 ? 0 : a << b)},
    {"shr.u16", 2, MAP2(u16, u16, u32, b > 15 ? 0 : a >> b)},
    {"shr.s16", 2, MAP2(i16, i16, u32, a >> std::min(b, 15u))},
    {"shr.u32", OF2(u32, b > 31 ? 0 : a >> b)}, {"shr.b32", OF2(u32, b > 31 ? 0 : a >> b)},
    {"shr.s32", 2, MAP2(i32, i32, u32, a >> std::min(b, 31u))},
    {"shr.s64", 2, MAP2(i64, i64, u32, a >> std::min(b, 63u))},
    {"shr.u64", 2, MAP2(u64, u64, u32, b > 63 ? 0 : a >> b)}, {"shr.b64", 2, MAP2(u64, u64, u32, b > 63 ? 0 : a >> b)},
    {"bfe.u32", 3, MAP3(u32, u32, u32, u32, extract_bits(a, b, c))},
    {"bfe.s32", 3, MAP3(i32, i32, u32, u32, extract_bits(a, b, c))},
    {"bfe.u64", 3, MAP3(u64, u64, u32, u32, extract_bits(a, b, c))},
    {"bfe.s64", 3, MAP3(i64, i64, u32, u32, extract_bits(a, b, c))},
    {"prmt.b32", OF3(u32, permute_bytes(a, b, c))},
    {"shf.l.wrap.b32", OF3(u32, ((u64)b << 32 | a) << (c & 31) >> 32)},
    {"shf.r.wrap.b32", OF3(u32, ((u64)b << 32 | a) >> (c & 31))},
    {"popc.b32", OF1(u32, std::popcount(a))}, {"clz.b32", OF1(u32, std::countl_zero(a))},
    {"brev.b32", OF1(u32, reverse_bits(a))},
    // fp32
    WITH_FLUSH2("add", a + b), WITH_FLUSH2("sub", a - b), WITH_FLUSH2("mul", a * b), WITH_FLUSH2("div", a / b),
    WITH_FLUSH2("min", std::fmin(a, b)), WITH_FLUSH2("max", std::fmax(a, b)),
    {"min.NaN.f32", OF2(float, min_nan(a, b))}, {"max.NaN.f32", OF2(float, max_nan(a, b))},
    {"min.f32", OF3(float, std::fmin(std::fmin(a, b), c))}, {"max.f32", OF3(float, std::fmax(std::fmax(a, b), c))},
    {"min.NaN.f32", OF3(float, min_nan(min_nan(a, b), c))}, {"max.NaN.f32", OF3(float, max_nan(max_nan(a, b), c))},
    {"fma.f32", OF3(float, std::fma(a, b, c))},
    {"fma.ftz.f32", OF3(float, flush(std::fma(flush(a), flush(b), flush(c))))},
    {"abs.f32", OF1(u32, a & 0x7FFFFFFF)}, {"abs.ftz.f32", OF1(float, flush(std::fabs(a)))},
    {"neg.f32", OF1(u32, a ^ 0x80000000)}, {"neg.ftz.f32", OF1(float, flush(-a))},
    {"copysign.f32", OF2(u32, (a & 0x80000000) | (b & 0x7FFFFFFF))},
    WITH_FLUSH1("ex2", std::exp2(a)), WITH_FLUSH1("lg2", std::log2(a)), WITH_FLUSH1("rcp", 1 / a),
    WITH_FLUSH1("sqrt", std::sqrt(a)), WITH_FLUSH1("rsqrt", 1 / std::sqrt(a)),
    WITH_FLUSH1("sin", std::sin(a)), WITH_FLUSH1("cos", std::cos(a)), {"tanh.f32", OF1(float, std::tanh(a))},
    {"add.f32x2", OF2(u64, two_floats(low(a) + low(b), high(a) + high(b)))},
    {"sub.f32x2", OF2(u64, two_floats(low(a) - low(b), high(a) - high(b)))},
    {"mul.f32x2", OF2(u64, two_floats(low(a) * low(b), high(a) * high(b)))},
    {"fma.f32x2", OF3(u64, two_floats(std::fma(low(a), low(b), low(c)), std::fma(high(a), high(b), high(c))))},
    // fp64
    {"add.f64", OF2(double, a + b)}, {"sub.f64", OF2(double, a - b)}, {"mul.f64", OF2(double, a * b)},
    {"div.f64", OF2(double, a / b)}, {"fma.f64", OF3(double, std::fma(a, b, c))}, {"neg.f64", OF1(double, -a)},
    {"sqrt.f64", OF1(double, std::sqrt(a))},
    // half precision, also mixed with fp32
    HALF_TYPE("bf16", Bf16), HALF_TYPE("f16", Fp16),
    // predicates
    {"and.pred", ON_PREDICATES(2, a & b)}, {"or.pred", ON_PREDICATES(2, a | b)}, {"xor.pred", ON_PREDICATES(2, a ^ b)},
    {"not.pred", ON_PREDICATES(1, ~a)}, {"mov.pred", ON_PREDICATES(1, a)},
};

}  // namespace

// Ignores rounding to nearest even and the words for approximation.
Run arithmetic(const Words& opcode, size_t inputs) {
  static const auto table = [] {
    std::map<std::pair<std::string_view, size_t>, Run> runs;
    for (const Entry& entry : TABLE) runs[{entry.opcode, entry.inputs}] = entry.run;
    return runs;
  }();
  std::string key = opcode[0];
  for (size_t i = 1; i < opcode.size(); i++)
    if (opcode[i] != "rn" && opcode[i] != "approx" && opcode[i] != "full") key += "." + opcode[i];
  auto found = table.find({key, inputs});
  return found == table.end() ? nullptr : found->second;
}

}  // namespace emulator
