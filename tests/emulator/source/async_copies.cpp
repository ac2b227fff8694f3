// cp.async and mbarriers. Copies complete as late as allowed, so that a missing wait gives incorrect values.
#include <utility>
#include "instructions.hpp"

namespace emulator {

u32 new_copy(Warp& w, const Instruction& I) {
  auto& copies = w.cta->copies;
  copies.push_back({0, (int)(&I - w.cta->launch->kernel->code.data())});
  return copies.size() - 1;
}
void observe(Warp& w, u32 copy) {
  w.cta->copies[copy].observers |= 1u << w.id;
  w.cta->observed.push_back(copy);
}
bool arrives_early() { return settings.early == 2 ? flip_coin() : settings.early; }

// ---- cp.async ----

void cp_async(Warp& w, Instruction& I, u32 mask) {
  const u32* to = words(w, I, 0);
  const u64* from = longs(w, I, 1);
  const bool has_size = I.operands.size() > 2, early = arrives_early();
  const u32 copy = new_copy(w, I), bytes = I.count;
  u32 addresses[32], moved = 0;
  check_grid_waited(w, I, "cp.async");
  u64 sources[32];
  each_lane(mask, [&](int lane) {
    addresses[lane] = to[lane] + I.offset, sources[lane] = from[lane] + I.second_offset;
    u32 size = has_size ? words(w, I, 2)[lane] : bytes;
    if (size > bytes) {
      report(w, I, "cp-async-size", "%u source bytes of %u", size, bytes);
      size = bytes;
    }
    if (!check_shared(w, I, addresses[lane], bytes, bytes, "cp.async")) return;
    CpAsync c{addresses[lane], bytes, copy, {}};
    if (size && sources[lane] % bytes)
      report(w, I, "global-misaligned", "cp.async of %u bytes from %#llx", bytes, (unsigned long long)sources[lane]);
    else if (size && check_global(w, I, sources[lane], size, "cp.async")) {
      note_global_read(w, I, sources[lane], size);
      std::memcpy(c.data, (void*)sources[lane], size);
      moved |= 1u << lane;
    }
    note_shared_write(w, I, addresses[lane], bytes, nullptr, copy);
    if (early) {
      std::memcpy(w.cta->at(c.shared), c.data, bytes);
      c.bytes = 0;
    }
    w.copies.open.push_back(c);
  });
  measure_banks(w, I, addresses, mask, bytes);
  measure_sectors(w, I, sources, moved, bytes);
}
void cp_async_commit(Warp& w, Instruction&, u32) { w.copies.commit(); }
void cp_async_wait(Warp& w, Instruction& I, u32) {
  if (I.count < 0) w.copies.commit();  // wait_all
  while (w.copies.committed.size() > (size_t)std::max(I.count, 0))
    for (auto& c : w.copies.take_oldest()) {
      std::memcpy(w.cta->at(c.shared), c.data, c.bytes);
      observe(w, c.copy);
    }
  w.cta->sequence++;
}

// ---- mbarrier ----

static Mbarrier* find_mbarrier(Warp& w, const Instruction& I, u32 address, const char* what) {
  auto found = w.cta->mbarriers.find(address);
  if (found != w.cta->mbarriers.end()) return &found->second;
  report(w, I, "mbarrier-not-initialized", "%s at offset %d", what, shared_offset(address));
  return nullptr;
}
void complete_phase(Mbarrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.phase++, b.pending = b.count;
}

void mbarrier_init(Warp& w, Instruction& I, u32 mask) {
  each_lane(mask, [&](int lane) {
    const u32 address = words(w, I, 0)[lane] + I.offset;
    if (!check_shared(w, I, address, 8, 8, "mbarrier.init")) return;
    if (w.cta->mbarriers.erase(address)) report(w, I, "mbarrier-init-of-live", "offset %d", shared_offset(address));
    note_shared_write(w, I, address, 8, nullptr);
    Mbarrier& b = w.cta->mbarriers[address];
    b.count = b.pending = words(w, I, 1)[lane];
  });
  w.cta->sequence++;
}
void mbarrier_inval(Warp& w, Instruction& I, u32 mask) {
  each_lane(mask, [&](int lane) {
    const u32 address = words(w, I, 0)[lane] + I.offset;
    Mbarrier* b = find_mbarrier(w, I, address, "inval");
    if (!b) return;
    if (!b->loads.empty()) report(w, I, "mbarrier-inval-with-pending-loads", "offset %d", shared_offset(address));
    for (auto& load : b->loads) deliver(*w.cta, *b, load);
    w.cta->mbarriers.erase(address);
    note_shared_write(w, I, address, 8, nullptr);
  });
  w.cta->sequence++;
}
void mbarrier_arrive(Warp& w, Instruction& I, u32 mask) {
  const bool expects_bytes = I.mode, has_operand = (int)I.operands.size() > (int)I.destinations + 1;
  each_lane(mask, [&](int lane) {
    const u32 address = words(w, I, I.destinations)[lane] + I.offset;
    Mbarrier* b = find_mbarrier(w, I, address, "arrive");
    if (!b) return;
    const u32 operand = has_operand ? words(w, I, I.destinations + 1)[lane] : 0;
    if (expects_bytes) b->bytes += operand;
    b->pending -= has_operand && !expects_bytes ? operand : 1;
    if (b->pending < 0) report(w, I, "mbarrier-arrive-overflow", "offset %d", shared_offset(address));
    complete_phase(*b);
  });
}
// The first try fails unless the phase is complete, as it may on hardware; code must try again.
bool mbarrier_try_wait(Warp& w, Instruction& I, u32 mask) {
  const int lane = std::countr_zero(mask);
  const u32 address = words(w, I, 1)[lane] + I.offset, parity = words(w, I, 2)[lane] & 1;
  Mbarrier* b = find_mbarrier(w, I, address, "wait");
  if (!b) return w.cta->aborted = true;
  auto complete = [&] { return (b->phase & 1) != parity; };
  if (!complete() && w.tried && b->pending == 0) {  // the latest time at which the loads may complete
    for (auto& load : std::exchange(b->loads, {})) deliver(*w.cta, *b, load);
    complete_phase(*b);
  }
  if (complete())
    for (auto& [phase, copy] : b->delivered)
      if (phase < b->phase) observe(w, copy);
  w.mbarrier = address;
  set_predicate(w, I, 0, complete() ? ALL : 0, mask);
  return complete();
}
void fence_proxy(Warp& w, Instruction&, u32) { w.proxy_fence = ++w.cta->sequence; }

}  // namespace emulator
