// TMA: tensor copies between global and shared memory, with 1 to 5 dimensions and swizzles.
#include "instructions.hpp"

namespace emulator {
namespace {

struct TensorMap {
  u64 address;
  u32 rank, swizzle, element_bytes;
  bool fills_nan;  // outside the tensor; else 0
  u64 sizes[5], strides[5];
  u32 box[5];

  u32 box_bytes() const {
    u32 bytes = element_bytes;
    for (u32 i = 0; i < rank; i++) bytes *= box[i];
    return bytes;
  }
};

bool read_map(Warp& w, const Instruction& I, u64 at, TensorMap& map) {  // as the stand-in driver packs it
  constexpr u8 BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};       // by CUtensorMapDataType
  const Launch& launch = *w.cta->launch;
  const u64 first = (u64)launch.parameters;
  if (at < first || at + 128 > first + launch.kernel->parameter_bytes) {
    report(w, I, "tensor-map", "the map at %#llx is not a parameter", (unsigned long long)at);
    return false;
  }
  const u64* packed = (const u64*)at;
  const u32 type = packed[1] >> 32;
  map.address = packed[0], map.rank = packed[1] >> 16 & 0xFFFF, map.swizzle = packed[1] >> 8 & 255, map.fills_nan = packed[1] & 255;
  if (type >= sizeof BYTES || map.rank < 1 || map.rank > 5) {
    report(w, I, "tensor-map", "not a map: type %u, rank %u", type, map.rank);
    return false;
  }
  if ((int)map.rank != I.count) {
    report(w, I, "tensor-map", "the map has rank %u, the instruction %d coordinates", map.rank, I.count);
    return false;
  }
  map.element_bytes = BYTES[type];
  for (u32 i = 0; i < map.rank; i++)
    map.sizes[i] = packed[2 + 2 * i] >> 16, map.box[i] = packed[2 + 2 * i] & 0xFFFF, map.strides[i] = packed[3 + 2 * i];
  return true;
}

// Up to 16 bytes of a box. `inside` of its `bytes` lie in the tensor, after `skipped` bytes.
struct Piece {
  u32 shared, bytes, inside, skipped;
  u64 global;
};
template <class F> void each_piece(const TensorMap& map, const TmaCopy& copy, F f) {
  u32 rows = 1;
  for (u32 i = 1; i < map.rank; i++) rows *= map.box[i];
  const u32 row_bytes = map.box[0] * map.element_bytes;
  for (u32 row = 0; row < rows; row++) {
    bool row_inside = true;
    u64 row_address = map.address;
    for (u32 i = 1, rest = row; i < map.rank; rest /= map.box[i], i++) {
      const i64 x = (i64)copy.coordinates[i] + rest % map.box[i];
      row_inside &= x >= 0 && x < (i64)map.sizes[i];
      row_address += x * map.strides[i - 1];
    }
    for (u32 byte = 0; byte < row_bytes; byte += 16) {
      const u32 bytes = std::min(16u, row_bytes - byte);
      const i64 first = copy.coordinates[0] + (i64)byte / map.element_bytes, elements = bytes / map.element_bytes;
      const i64 from = std::max<i64>(first, 0), to = std::min<i64>(first + elements, map.sizes[0]);
      Piece piece{swizzled(copy.shared + row * row_bytes + byte, map.swizzle), bytes, 0, 0, 0};
      if (row_inside && from < to) {
        piece.inside = (to - from) * map.element_bytes, piece.skipped = (from - first) * map.element_bytes;
        piece.global = row_address + from * map.element_bytes;
      }
      f(piece);
    }
  }
}

bool check_box(Warp& w, const Instruction& I, const TensorMap& map, u32 shared) {
  const u32 inner = map.box[0] * map.element_bytes;
  if (shared % 128) {
    report(w, I, "tma-misaligned", "shared offset %d is no multiple of 128 bytes", shared_offset(shared));
    return false;
  }
  if (map.swizzle && inner != 16u << map.swizzle)
    report(w, I, "tma-box", "the inner side has %u bytes, the swizzle %u", inner, 16u << map.swizzle);
  return check_shared(w, I, shared, map.box_bytes(), 16, "TMA");
}

// Reads the operands of a load or store: address in shared memory, map, coordinates.
TmaCopy read_operands(Warp& w, Instruction& I, int lane) {
  TmaCopy copy{};
  copy.shared = words(w, I, 0)[lane] + I.offset, copy.map = longs(w, I, 1)[lane];
  for (int i = 0; i < I.count; i++) copy.coordinates[i] = words(w, I, 2 + i)[lane];
  return copy;
}

std::vector<u8> box_in_shared(Cta& cta, const TensorMap& map, const TmaCopy& copy) {
  std::vector<u8> bytes;
  each_piece(map, copy, [&](const Piece& p) { bytes.insert(bytes.end(), cta.at(p.shared), cta.at(p.shared) + p.bytes); });
  return bytes;
}

void finish_store(Warp& w, const TmaCopy& store) {
  Cta& cta = *w.cta;
  Instruction& I = cta.launch->kernel->code[store.instruction];
  TensorMap map;
  read_map(w, I, store.map, map);
  if (box_in_shared(cta, map, store) != store.source)
    report(w, I, "shared-changed-under-tma-store", "the source of a TMA store was overwritten before the wait");
  each_piece(map, store, [&](const Piece& p) {
    note_shared_read(w, I, p.shared, p.bytes);
    if (p.inside && check_global(w, I, p.global, p.inside, "TMA store"))
      write_global(w, I, p.global, p.inside, cta.at(p.shared) + p.skipped);
  });
}

}  // namespace

void deliver(Cta& cta, Mbarrier& barrier, const TmaCopy& load) {
  Warp& w = cta.warps[0];
  Instruction& I = cta.launch->kernel->code[load.instruction];
  TensorMap map;
  read_map(w, I, load.map, map);
  each_piece(map, load, [&](const Piece& p) {
    u8* to = cta.at(p.shared);
    for (u32 i = 0; i < p.bytes; i++)  // NaN: 0x7FFF or 0x7FFFFFFF
      to[i] = !map.fills_nan ? 0 : i % map.element_bytes == map.element_bytes - 1 ? 0x7F : 0xFF;
    if (p.inside && check_global(w, I, p.global, p.inside, "TMA load")) {
      note_global_read(w, I, p.global, p.inside);
      std::memcpy(to + p.skipped, (void*)p.global, p.inside);
    }
  });
  barrier.bytes -= load.bytes;
  barrier.delivered.push_back({barrier.phase, load.copy});
}

void tma_load(Warp& w, Instruction& I, u32 mask) {
  check_grid_waited(w, I, "TMA load");
  each_lane(mask, [&](int lane) {
    TmaCopy load = read_operands(w, I, lane);
    TensorMap map;
    if (!read_map(w, I, load.map, map) || !check_box(w, I, map, load.shared)) return;
    const u32 address = words(w, I, 2 + I.count)[lane] + I.second_offset;
    auto barrier = w.cta->mbarriers.find(address);
    if (barrier == w.cta->mbarriers.end()) {
      report(w, I, "mbarrier-not-initialized", "TMA load signals offset %d", shared_offset(address));
      return;
    }
    load.bytes = map.box_bytes(), load.copy = new_copy(w, I), load.instruction = w.cta->copies.back().instruction;
    note_shared_write(w, I, load.shared, load.bytes, nullptr, load.copy);
    if (arrives_early()) {
      deliver(*w.cta, barrier->second, load);
      complete_phase(barrier->second);
    } else barrier->second.loads.push_back(load);
  });
  w.cta->sequence++;
}

void tma_store(Warp& w, Instruction& I, u32 mask) {
  check_grid_waited(w, I, "TMA store");
  each_lane(mask, [&](int lane) {
    TmaCopy store = read_operands(w, I, lane);
    TensorMap map;
    if (!read_map(w, I, store.map, map) || !check_box(w, I, map, store.shared)) return;
    store.instruction = &I - w.cta->launch->kernel->code.data();
    each_piece(map, store, [&](const Piece& p) { note_shared_read(w, I, p.shared, p.bytes, ASYNC_PROXY); });
    store.source = box_in_shared(*w.cta, map, store);
    w.stores.open.push_back(std::move(store));
  });
}
void finish_stores(Warp& w, size_t may_stay) {
  while (w.stores.committed.size() > may_stay)
    for (auto& store : w.stores.take_oldest()) finish_store(w, store);
}
void bulk_commit(Warp& w, Instruction&, u32) { w.stores.commit(); }
void bulk_wait(Warp& w, Instruction& I, u32) { finish_stores(w, I.count); }

}  // namespace emulator
