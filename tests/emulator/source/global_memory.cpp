// Global memory: loads, stores, atomics, and checks of bounds, alignment and conflicts between CTAs.
#include "instructions.hpp"

namespace emulator {

// A live allocation. `written`, `read`: serial number of the CTA that used each byte in this launch, 0 or SEVERAL.
struct Allocation {
  u64 first = 0, end = 0, launch = 0;
  std::vector<u32> written, read;
};
static constexpr u32 SEVERAL = ~0u;
static constexpr u64 LARGEST_TRACKED = 256u << 20;

static std::map<u64, std::unique_ptr<Allocation>> allocations;  // by first address

static Allocation* find_allocation(u64 address) {
  u64 first = 1, end = ~0ull;  // without find_allocation, all addresses are valid
  if (settings.find_allocation && !settings.find_allocation(address, &first, &end)) return nullptr;
  auto& found = allocations[first];
  if (!found || found->end != end) {
    found = std::make_unique<Allocation>();
    found->first = first, found->end = end;
  }
  if (found->launch != launch_number) {
    found->launch = launch_number;
    found->written.clear(), found->read.clear();
  }
  return found.get();
}
static Allocation* allocation_of(Instruction& I, u64 address) {
  Allocation* last = I.allocation;
  if (I.allocation_launch == launch_number && last && address >= last->first && address < last->end) return last;
  I.allocation_launch = launch_number;
  return I.allocation = find_allocation(address);
}
static bool tracked(Allocation& a) {
  if (a.end - a.first > LARGEST_TRACKED) return false;
  if (a.written.empty()) a.written.resize(a.end - a.first), a.read.resize(a.end - a.first);
  return true;
}

u8* check_global(Warp& w, Instruction& I, u64 address, u32 bytes, const char* what) {
  const Allocation* found = allocation_of(I, address);
  const auto& index = w.cta->index;
  if (!found)
    report(w, I, "global-out-of-bounds", "%s of %u bytes at %#llx by CTA %u, %u, %u: in no live allocation", what, bytes,
           (unsigned long long)address, index[0], index[1], index[2]);
  else if (address + bytes > found->end)
    report(w, I, "global-out-of-bounds", "%s of %u bytes runs %llu bytes past an allocation of %llu bytes", what, bytes,
           (unsigned long long)(address + bytes - found->end), (unsigned long long)(found->end - found->first));
  else return (u8*)address;
  return nullptr;
}
// Stricter than PTX, which allows reading memory that the previous grid does not write.
void check_grid_waited(Warp& w, const Instruction& I, const char* what) {
  if (!w.waited) report(w, I, "global-before-grid-wait", "%s before griddepcontrol.wait, while the previous grid may run", what);
}
void wait_for_grid(Warp& w, Instruction&, u32) { w.waited = true; }
static u8* check_aligned(Warp& w, Instruction& I, u64 address, u32 bytes, const char* what) {
  check_grid_waited(w, I, what);
  if (address % bytes == 0) return check_global(w, I, address, bytes, what);
  report(w, I, "global-misaligned", "%s of %u bytes at %#llx", what, bytes, (unsigned long long)address);
  return nullptr;
}

void note_global_read(Warp& w, Instruction& I, u64 address, u32 bytes) {
  Allocation& a = *allocation_of(I, address);
  if (!tracked(a)) return;
  const u32 me = w.cta->serial;
  for (u64 i = address - a.first; i < address - a.first + bytes; i++) {
    if (a.written[i] && a.written[i] != me)
      report(w, I, "cross-cta-read-after-write", "CTA %u reads what CTA %u wrote in the same launch", me - 1, a.written[i] - 1);
    a.read[i] = a.read[i] == 0 || a.read[i] == me ? me : SEVERAL;
  }
}

// CTAs may write equal values to the same byte.
void write_global(Warp& w, Instruction& I, u64 address, u32 bytes, const u8* values) {
  Allocation& a = *allocation_of(I, address);
  if (tracked(a)) {
    const u32 me = w.cta->serial;
    for (u32 i = 0; i < bytes; i++) {
      u32& writer = a.written[address - a.first + i];
      const u32 reader = a.read[address - a.first + i];
      if (writer && writer != me && ((const u8*)address)[i] != values[i])
        report(w, I, "cross-cta-write-conflict", "CTAs %u and %u write different values to the same byte", writer - 1, me - 1);
      if (reader && reader != me)
        report(w, I, "cross-cta-write-after-read", "CTA %u writes what another one read in the same launch", me - 1);
      writer = me;
    }
  }
  std::memcpy((void*)address, values, bytes);
}

void measure_sectors(Warp& w, Instruction& I, const u64* addresses, u32 mask, u32 bytes) {
  if (!w.cta->measured || !mask) return;
  std::vector<u64> sectors;
  each_lane(mask, [&](int lane) {
    for (u64 s = addresses[lane] / 32; s <= (addresses[lane] + bytes - 1) / 32; s++) sectors.push_back(s);
  });
  std::sort(sectors.begin(), sectors.end());
  I.statistics.sectors += std::unique(sectors.begin(), sectors.end()) - sectors.begin();
  I.statistics.bytes += (u64)bytes * std::popcount(mask);
  I.statistics.accesses++;
}

// ---- elements per lane ----

void load_element(Warp& w, const Instruction& I, int operand, int lane, const u8* from) {
  const Operand& o = I.operands[operand];
  if (o.discarded) return;
  u64 value = 0;
  std::memcpy(&value, from, I.bytes);
  const int unused = 64 - 8 * I.bytes;
  if (I.is_signed) value = (i64)(value << unused) >> unused;
  if (o.cls == B64) longs(w, o)[lane] = value;
  else words(w, o)[lane] = o.cls == B16 ? (u16)value : (u32)value;
}
u64 store_value(Warp& w, const Instruction& I, int operand, int lane) {
  const Operand& o = I.operands[operand];
  return o.constant || o.cls == B64 ? longs(w, o)[lane] : words(w, o)[lane];
}

static bool is_parameter(Warp& w, u64 address, u32 bytes) {
  const u64 first = (u64)w.cta->launch->parameters;
  return address >= first && address + bytes <= first + w.cta->launch->kernel->parameter_bytes;
}
void load_parameter(Warp& w, Instruction& I, u32 mask) {
  const Operand& base = I.operands[I.destinations];  // a register holds the address if code selects one of two parameters
  each_lane(mask, [&](int lane) {
    const u64 address = (base.constant ? (u64)w.cta->launch->parameters : longs(w, base)[lane]) + I.offset;
    if (!is_parameter(w, address, I.vector * I.bytes))
      return report(w, I, "parameter-out-of-bounds", "load of %d bytes at %#llx", I.vector * I.bytes, (unsigned long long)address);
    for (int i = 0; i < I.vector; i++) load_element(w, I, i, lane, (const u8*)address + i * I.bytes);
  });
}
void load_global(Warp& w, Instruction& I, u32 mask) {
  static const std::vector<u8> refused(64, 0xEE);
  const u64* base = longs(w, I, I.destinations);
  const u32 bytes = I.vector * I.bytes;
  u64 addresses[32];
  each_lane(mask, [&](int lane) {
    const u64 address = addresses[lane] = base[lane] + I.offset;
    const u8* from = (const u8*)address;
    if (I.space != GENERIC || !is_parameter(w, address, bytes)) {
      from = check_aligned(w, I, address, bytes, "load");
      if (from) note_global_read(w, I, address, bytes);
      else from = refused.data();
    }
    for (int i = 0; i < I.vector; i++) load_element(w, I, i, lane, from + i * I.bytes);
  });
  measure_sectors(w, I, addresses, mask, bytes);
}
void store_global(Warp& w, Instruction& I, u32 mask) {
  const u64* base = longs(w, I, 0);
  const u32 bytes = I.vector * I.bytes;
  u64 addresses[32];
  each_lane(mask, [&](int lane) {
    const u64 address = addresses[lane] = base[lane] + I.offset;
    u8 values[64];
    for (int i = 0; i < I.vector; i++) {
      const u64 value = store_value(w, I, 1 + i, lane);
      std::memcpy(values + i * I.bytes, &value, I.bytes);
    }
    if (check_aligned(w, I, address, bytes, "store")) write_global(w, I, address, bytes, values);
  });
  measure_sectors(w, I, addresses, mask, bytes);
}

// ---- atomics ----

template <class T> static T combine(int mode, T old, T value, T replacement) {
  switch (mode) {
  case ADD: return old + value;
  case MAX: return std::max(old, value);
  case MIN: return std::min(old, value);
  case EXCHANGE: return value;
  case COMPARE_AND_SWAP: return old == value ? replacement : old;
  default:
    if constexpr (std::is_integral_v<T>) return mode == AND ? old & value : mode == OR ? old | value : old ^ value;
    return old;
  }
}
template <class T> static void update(Instruction& I, u8* at, u64 value, u64 replacement) {
  T old;
  std::memcpy(&old, at, sizeof old);
  const T result = combine<T>(I.mode, old, from_slot<T>(value), from_slot<T>(replacement));
  std::memcpy(at, &result, sizeof result);
}
void atomic(Warp& w, Instruction& I, u32 mask) {
  const int at = I.destinations;
  each_lane(mask, [&](int lane) {
    u8* target;
    if (I.space == SHARED) {
      const u32 address = words(w, I, at)[lane] + I.offset;
      target = check_shared(w, I, address, I.bytes, I.bytes, "atomic") ? w.cta->at(address) : nullptr;
    } else target = check_aligned(w, I, longs(w, I, at)[lane] + I.offset, I.bytes, "atomic");
    if (!target) return;
    u64 old = 0;
    std::memcpy(&old, target, I.bytes);
    const u64 value = store_value(w, I, at + 1, lane);
    const u64 replacement = I.mode == COMPARE_AND_SWAP ? store_value(w, I, at + 2, lane) : 0;
    if (I.is_float) update<float>(I, target, value, replacement);
    else if (I.bytes == 4 && I.is_signed) update<i32>(I, target, value, replacement);
    else if (I.bytes == 4) update<u32>(I, target, value, replacement);
    else if (I.is_signed) update<i64>(I, target, value, replacement);
    else update<u64>(I, target, value, replacement);
    if (at) load_element(w, I, 0, lane, (const u8*)&old);
  });
}

}  // namespace emulator
