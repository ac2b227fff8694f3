// Moves, packing, and exchange between lanes of a warp.
#include "instructions.hpp"

namespace emulator {

void trap(Warp& w, Instruction& I, u32) {
  report(w, I, "trap", "trap executed");
  w.cta->aborted = true;
}
void move32(Warp& w, Instruction& I, u32 mask) { assign(words(w, I, 0), words(w, I, 1), mask); }
void move64(Warp& w, Instruction& I, u32 mask) { assign(longs(w, I, 0), longs(w, I, 1), mask); }

static int bits_of_part(const Instruction& I, int parts) { return I.bytes * 8 / parts; }
static u64 low_bits(int bits) { return bits >= 64 ? ~0ull : (1ull << bits) - 1; }

void pack(Warp& w, Instruction& I, u32 mask) {
  const int parts = I.operands.size() - 1, bits = bits_of_part(I, parts);
  u64 whole[32] = {};
  for (int i = 0; i < parts; i++) {
    const u32* part = words(w, I, 1 + i);
    for (int l = 0; l < 32; l++) whole[l] |= (part[l] & low_bits(bits)) << (bits * i);
  }
  each_lane(mask, [&](int lane) {
    if (I.bytes == 8) longs(w, I, 0)[lane] = whole[lane];
    else words(w, I, 0)[lane] = whole[lane];
  });
}
void unpack(Warp& w, Instruction& I, u32 mask) {
  const int parts = I.destinations, bits = bits_of_part(I, parts);
  each_lane(mask, [&](int lane) {
    const u64 whole = I.bytes == 8 ? longs(w, I, parts)[lane] : words(w, I, parts)[lane];
    for (int i = 0; i < parts; i++)
      if (!I.operands[i].discarded) words(w, I, i)[lane] = whole >> (bits * i) & low_bits(bits);
  });
}

void shuffle(Warp& w, Instruction& I, u32 mask) {
  const int first = I.destinations;
  const u32 *values = words(w, I, first), *distances = words(w, I, first + 1), *clamps = words(w, I, first + 2);
  const u32* members = words(w, I, first + 3);
  u32 result[32], inside = 0;
  each_lane(mask, [&](int lane) {
    if (members[lane] & ~mask) report(w, I, "divergent-collective", "members %#x, active lanes %#x", members[lane], mask);
    const int segment = clamps[lane] >> 8 & 31, clamp = clamps[lane] & 31, b = distances[lane] & 31;
    const int last = (lane & segment) | (clamp & ~segment);  // for `up`, the first
    int source = I.mode == BUTTERFLY ? lane ^ b : I.mode == INDEX ? (lane & segment) | (b & ~segment)
               : I.mode == UP ? lane - b : lane + b;
    const bool in = I.mode == UP ? source >= last : source <= last;
    if (!in) source = lane;
    if (!(mask >> source & 1)) report(w, I, "shfl-from-inactive-lane", "lane %d reads lane %d", lane, source);
    result[lane] = values[source], inside |= (u32)in << lane;
  });
  assign(words(w, I, 0), result, mask);
  if (I.destinations > 1) set_predicate(w, I, 1, inside, mask);
}

void reduce(Warp& w, Instruction& I, u32 mask) {
  const u32* values = words(w, I, 1);
  u32 result = values[std::countr_zero(mask)];
  each_lane(mask & (mask - 1), [&](int lane) {
    const u32 v = values[lane];
    switch (I.mode) {
    case ADD: result += v; break;
    case MAX: result = I.is_signed ? (u32)std::max((i32)result, (i32)v) : std::max(result, v); break;
    case MIN: result = I.is_signed ? (u32)std::min((i32)result, (i32)v) : std::min(result, v); break;
    case AND: result &= v; break;
    case OR: result |= v; break;
    default: result ^= v;
    }
  });
  each_lane(mask, [&](int lane) { words(w, I, 0)[lane] = result; });
}

void elect(Warp& w, Instruction& I, u32 mask) {
  each_lane(mask, [&](int lane) { words(w, I, 0)[lane] = std::countr_zero(mask); });
  if (I.destinations > 1) set_predicate(w, I, 1, mask & -mask, mask);
}

void vote(Warp& w, Instruction& I, u32 mask) {
  const u32 yes = predicate(w, I, I.destinations) & mask;
  if (I.mode == BALLOT) each_lane(mask, [&](int lane) { words(w, I, 0)[lane] = yes; });
  else set_predicate(w, I, 0, (I.mode == ANY_LANE ? yes != 0 : yes == mask) ? ALL : 0, mask);
}

}  // namespace emulator
