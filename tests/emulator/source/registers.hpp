// Access to the registers of a warp, and functions of one to three operands over its 32 lanes.
#pragma once
#include <bit>
#include <type_traits>
#include "types.hpp"

namespace emulator {

template <class T> struct SlotOf { using type = u32; };
template <> struct SlotOf<u64> { using type = u64; };
template <> struct SlotOf<i64> { using type = u64; };
template <> struct SlotOf<double> { using type = u64; };
template <class T> using Slot = typename SlotOf<T>::type;

template <class T> inline T from_slot(Slot<T> bits) {
  if constexpr (std::is_floating_point_v<T>) return std::bit_cast<T>(bits);
  else return (T)bits;
}
template <class T> inline Slot<T> to_slot(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::bit_cast<Slot<T>>(value);
  else if constexpr (sizeof(T) < 4) return (std::make_unsigned_t<T>)value;
  else return (Slot<T>)value;
}

template <class F> inline void each_lane(u32 mask, F f) {
  for (int lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) f(lane);
}

inline u32* words(Warp& w, const Operand& o) { return w.registers + o.slot; }
inline u32* words(Warp& w, const Instruction& I, int i) { return words(w, I.operands[i]); }
inline u64* longs(Warp& w, const Operand& o) { return (u64*)(w.registers + (o.constant ? o.slot64 : o.slot)); }
inline u64* longs(Warp& w, const Instruction& I, int i) { return longs(w, I.operands[i]); }
template <class T> inline Slot<T>* slots(Warp& w, const Instruction& I, int i) {
  if constexpr (sizeof(Slot<T>) == 8) return longs(w, I, i);
  else return words(w, I, i);
}

// A predicate is one word with one bit per lane.
inline u32 predicate(Warp& w, const Operand& o) {
  u32 bits = w.registers[o.slot];
  if (o.constant) bits = bits ? ALL : 0;
  return o.negated ? ~bits : bits;
}
inline u32 predicate(Warp& w, const Instruction& I, int i) { return predicate(w, I.operands[i]); }
inline void set_predicate(Warp& w, const Instruction& I, int i, u32 bits, u32 mask) {
  u32& word = w.registers[I.operands[i].slot];
  word = (word & ~mask) | (bits & mask);
}

template <class S> inline void assign(S* destination, const S* values, u32 mask) {
  if (mask == ALL) std::memcpy(destination, values, 32 * sizeof(S));
  else each_lane(mask, [&](int lane) { destination[lane] = values[lane]; });
}

// Collect the results first, because source and destination may be the same register.
template <class R, class A, class F> inline void map1(Warp& w, Instruction& I, u32 mask, F f) {
  const Slot<A>* a = slots<A>(w, I, 1);
  Slot<R> result[32];
  for (int l = 0; l < 32; l++) result[l] = to_slot<R>(f(from_slot<A>(a[l])));
  assign(slots<R>(w, I, 0), result, mask);
}
template <class R, class A, class B, class F> inline void map2(Warp& w, Instruction& I, u32 mask, F f) {
  const Slot<A>* a = slots<A>(w, I, 1);
  const Slot<B>* b = slots<B>(w, I, 2);
  Slot<R> result[32];
  for (int l = 0; l < 32; l++) result[l] = to_slot<R>(f(from_slot<A>(a[l]), from_slot<B>(b[l])));
  assign(slots<R>(w, I, 0), result, mask);
}
template <class R, class A, class B, class C, class F> inline void map3(Warp& w, Instruction& I, u32 mask, F f) {
  const Slot<A>* a = slots<A>(w, I, 1);
  const Slot<B>* b = slots<B>(w, I, 2);
  const Slot<C>* c = slots<C>(w, I, 3);
  Slot<R> result[32];
  for (int l = 0; l < 32; l++) result[l] = to_slot<R>(f(from_slot<A>(a[l]), from_slot<B>(b[l]), from_slot<C>(c[l])));
  assign(slots<R>(w, I, 0), result, mask);
}

#define MAP1(R, A, E) \
  [](Warp& w, Instruction& I, u32 mask) { map1<R, A>(w, I, mask, [](A a) -> R { return E; }); }
#define MAP2(R, A, B, E) \
  [](Warp& w, Instruction& I, u32 mask) { map2<R, A, B>(w, I, mask, [](A a, B b) -> R { return E; }); }
#define MAP3(R, A, B, C, E) \
  [](Warp& w, Instruction& I, u32 mask) { map3<R, A, B, C>(w, I, mask, [](A a, B b, C c) -> R { return E; }); }

}  // namespace emulator
