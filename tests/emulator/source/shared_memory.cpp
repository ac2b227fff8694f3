// Shared memory: loads, stores, ldmatrix, stmatrix, and checks for races.
//
// A barrier begins a new epoch. Two warps that use the same bytes in one epoch race, unless both read, or both write
// equal values. An asynchronous copy races with every warp that has not waited for it.
#include "instructions.hpp"

namespace emulator {

bool check_shared(Warp& w, const Instruction& I, u32 address, u32 bytes, u32 alignment, const char* what) {
  const size_t size = w.cta->shared.size();
  if (address < SHARED_BASE || (u64)address + bytes > SHARED_BASE + size)
    report(w, I, "shared-out-of-bounds", "%s of %u bytes at offset %d of %zu, warp %d", what, bytes, shared_offset(address), size, w.id);
  else if (address % alignment)
    report(w, I, "shared-misaligned", "%s of %u bytes at offset %d", what, bytes, shared_offset(address));
  else return true;
  return false;
}

template <class F> static void each_shadow(Warp& w, u32 address, u32 bytes, F f) {
  Shadow* shadow = &w.cta->shadows[shared_offset(address) / 2];
  for (u32 i = 0; i < (bytes + 1) / 2; i++) f(shadow[i], shared_offset(address) + 2 * (int)i);
}
static bool has_waited(const Warp& w, const Shadow& s) { return w.cta->copies[s.copy].observers >> w.id & 1; }
static void report_async(Warp& w, const Instruction& I, const Shadow& s, const char* what, int offset) {
  const Instruction& copy = w.cta->launch->kernel->code[w.cta->copies[s.copy].instruction];
  report(w, I, "shared-race-async", "warp %d %s offset %d without having waited for: %.90s", w.id, what, offset, copy.text.c_str());
}
static void note_reader(Warp& w, Shadow& s) {
  if (s.read != w.cta->epoch) s.read = w.cta->epoch, s.readers = 0;
  s.readers |= 1u << w.id;
}

void note_readers(Warp& w, u32 address, u32 bytes) {
  each_shadow(w, address, bytes, [&](Shadow& s, int) { note_reader(w, s); });
}
void note_shared_read(Warp& w, const Instruction& I, u32 address, u32 bytes, Proxy proxy) {
  Cta& cta = *w.cta;
  each_shadow(w, address, bytes, [&](Shadow& s, int offset) {
    if (s.written < cta.first_epoch) report(w, I, "shared-read-of-unwritten", "offset %d, warp %d", offset, w.id);
    else if (s.asynchronous) {
      if (!has_waited(w, s)) report_async(w, I, s, "reads", offset);
    } else {
      if (s.writer != w.id && s.written == cta.epoch)
        report(w, I, "shared-race-read", "warp %d reads offset %d, written by warp %d since the last barrier", w.id, offset, s.writer);
      if (proxy == ASYNC_PROXY && s.sequence > cta.warps[s.writer].proxy_fence && s.sequence > w.proxy_fence)
        report(w, I, "missing-proxy-fence", "offset %d, written by warp %d, without fence.proxy.async", offset, s.writer);
    }
    note_reader(w, s);
  });
}

void note_shared_write(Warp& w, const Instruction& I, u32 address, u32 bytes, const u8* values, int copy) {
  Cta& cta = *w.cta;
  auto barrier = cta.mbarriers.upper_bound(address + bytes - 1);
  if (barrier != cta.mbarriers.begin() && std::prev(barrier)->first + 8 > address)
    report(w, I, "write-over-live-mbarrier", "offset %d", shared_offset(std::prev(barrier)->first));
  const u32 me = 1u << w.id;
  each_shadow(w, address, bytes, [&](Shadow& s, int offset) {
    if (bytes > 1) {  // single bytes of two warps may share a shadow
      const bool live = s.written >= cta.first_epoch, race = live && !s.asynchronous && s.writer != w.id && s.written == cta.epoch;
      const bool equal = values && !std::memcmp(&cta.shared[offset], values + offset - shared_offset(address), 2);
      if (live && s.asynchronous && !has_waited(w, s)) report_async(w, I, s, "writes", offset);
      if (race && !equal)
        report(w, I, "shared-race-write", "warps %d and %d write offset %d between the same barriers", s.writer, w.id, offset);
      if (s.read == cta.epoch && (s.readers & ~me))
        report(w, I, "shared-race-write-after-read", "warp %d writes offset %d that warps %#x read since the last barrier", w.id,
               offset, s.readers & ~me);
    }
    s.written = cta.epoch, s.writer = w.id, s.sequence = cta.sequence, s.asynchronous = copy >= 0, s.copy = copy;
  });
}
// A wavefront serves 4-byte accesses of a warp, 8-byte accesses of half a warp, or 16-byte accesses of a quarter.
void measure_banks(Warp& w, Instruction& I, const u32* addresses, u32 mask, u32 bytes) {
  if (!w.cta->measured || !mask) return;
  const int together = bytes >= 16 ? 8 : bytes == 8 ? 16 : 32;
  for (int first = 0; first < 32; first += together) {
    std::vector<u32> used;
    each_lane(mask & (together == 32 ? ALL : ((1u << together) - 1) << first), [&](int lane) {
      for (u32 byte = 0; byte < std::max(bytes, 4u); byte += 4) used.push_back((addresses[lane] + byte) / 4);
    });
    if (used.empty()) continue;
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    u32 words_of_bank[32] = {};
    for (u32 word : used) words_of_bank[word % 32]++;
    I.statistics.wavefronts += *std::max_element(words_of_bank, words_of_bank + 32);
    I.statistics.ideal_wavefronts++;
  }
  I.statistics.accesses++;
  I.statistics.bytes += (u64)bytes * std::popcount(mask);
}

void load_shared(Warp& w, Instruction& I, u32 mask) {
  static const std::vector<u8> refused(64, 0);
  const u32* base = words(w, I, I.destinations);
  const u32 bytes = I.vector * I.bytes;
  u32 addresses[32];
  each_lane(mask, [&](int lane) {
    const u32 address = addresses[lane] = base[lane] + I.offset;
    const u8* from = refused.data();
    if (check_shared(w, I, address, bytes, bytes, "load")) {
      from = w.cta->at(address);
      note_shared_read(w, I, address, bytes);
    }
    for (int i = 0; i < I.vector; i++) load_element(w, I, i, lane, from + i * I.bytes);
  });
  measure_banks(w, I, addresses, mask, bytes);
}
static void store(Warp& w, Instruction& I, u32 address, u32 bytes, const u8* values, const char* what) {
  if (!check_shared(w, I, address, bytes, bytes, what)) return;
  note_shared_write(w, I, address, bytes, values);
  std::memcpy(w.cta->at(address), values, bytes);
}
void store_shared(Warp& w, Instruction& I, u32 mask) {
  const u32* base = words(w, I, 0);
  const u32 bytes = I.vector * I.bytes;
  u32 addresses[32];
  each_lane(mask, [&](int lane) {
    addresses[lane] = base[lane] + I.offset;
    u8 values[64];
    for (int i = 0; i < I.vector; i++) {
      const u64 value = store_value(w, I, 1 + i, lane);
      std::memcpy(values + i * I.bytes, &value, I.bytes);
    }
    store(w, I, addresses[lane], bytes, values, "store");
  });
  w.cta->sequence++;
  measure_banks(w, I, addresses, mask, bytes);
}

// ---- ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements; a lane has the address of a row of 16 bytes ----

using Tile = u16[8][8];
static u32 first_lanes(int count) { return count >= 32 ? ALL : (1u << count) - 1; }

void load_matrix(Warp& w, Instruction& I, u32 mask) {
  require_all_lanes(w, I, mask);
  const u32* base = words(w, I, I.destinations);
  Tile tiles[4] = {};
  u32 addresses[32];
  for (int row = 0; row < 8 * I.count; row++) {
    addresses[row] = base[row] + I.offset;
    if (!check_shared(w, I, addresses[row], 16, 16, "ldmatrix")) continue;
    note_shared_read(w, I, addresses[row], 16);
    std::memcpy(tiles[row / 8][row % 8], w.cta->at(addresses[row]), 16);
  }
  for (int i = 0; i < I.count; i++)
    for (int l = 0; l < 32; l++) {
      const int row = l / 4, column = l % 4 * 2;
      const Tile& t = tiles[i];
      words(w, I, i)[l] = I.transposed ? t[column][row] | (u32)t[column + 1][row] << 16 : t[row][column] | (u32)t[row][column + 1] << 16;
    }
  measure_banks(w, I, addresses, first_lanes(8 * I.count), 16);
}
void store_matrix(Warp& w, Instruction& I, u32 mask) {
  require_all_lanes(w, I, mask);
  const u32* base = words(w, I, 0);
  Tile tiles[4];
  for (int i = 0; i < I.count; i++)
    for (int l = 0; l < 32; l++) {
      const int row = l / 4, column = l % 4 * 2;
      Tile& t = tiles[i];
      const u32 pair = words(w, I, 1 + i)[l];
      (I.transposed ? t[column][row] : t[row][column]) = pair;
      (I.transposed ? t[column + 1][row] : t[row][column + 1]) = pair >> 16;
    }
  u32 addresses[32];
  for (int row = 0; row < 8 * I.count; row++) {
    addresses[row] = base[row] + I.offset;
    store(w, I, addresses[row], 16, (const u8*)tiles[row / 8][row % 8], "stmatrix");
  }
  w.cta->sequence++;
  measure_banks(w, I, addresses, first_lanes(8 * I.count), 16);
}

}  // namespace emulator
