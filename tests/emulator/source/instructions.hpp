// The functions that execute instructions, by family, and helpers that several families use.
#pragma once
#include <vector>
#include "numbers.hpp"
#include "registers.hpp"

namespace emulator {

using Words = std::vector<std::string>;  // of an opcode, between the dots

Run arithmetic(const Words& opcode, size_t inputs);  // nullptr if unknown
Run conversion(const Words& opcode, Instruction& I);
Run comparison(const Words& opcode, Instruction& I);
Run selection(const Words& opcode);  // selp, lop3, bfi

#define DECLARE(name) void name(Warp&, Instruction&, u32);
// lanes.cpp
DECLARE(trap) DECLARE(move32) DECLARE(move64) DECLARE(pack) DECLARE(unpack)
DECLARE(shuffle) DECLARE(reduce) DECLARE(elect) DECLARE(vote)
// global_memory.cpp
DECLARE(load_parameter) DECLARE(load_global) DECLARE(store_global) DECLARE(atomic) DECLARE(wait_for_grid)
// shared_memory.cpp
DECLARE(load_shared) DECLARE(store_shared) DECLARE(load_matrix) DECLARE(store_matrix)
// async_copies.cpp
DECLARE(cp_async) DECLARE(cp_async_commit) DECLARE(cp_async_wait)
DECLARE(mbarrier_init) DECLARE(mbarrier_inval) DECLARE(mbarrier_arrive) DECLARE(fence_proxy)
// tma.cpp
DECLARE(tma_load) DECLARE(tma_store) DECLARE(bulk_commit) DECLARE(bulk_wait)
// matrices.cpp, wgmma.cpp
DECLARE(mma) DECLARE(wgmma_issue) DECLARE(wgmma_fence) DECLARE(wgmma_commit) DECLARE(wgmma_wait)
#undef DECLARE

bool mbarrier_try_wait(Warp& w, Instruction& I, u32 mask);  // true when the phase is complete
void wait_for_products(Warp& w, size_t may_stay);

// Runs a warp until it waits or ends, or for `portion` instructions; returns false if it made no progress.
bool run_warp(Warp& w, u64 portion);

// ---- memory ----

void load_element(Warp& w, const Instruction& I, int operand, int lane, const u8* from);
u64 store_value(Warp& w, const Instruction& I, int operand, int lane);

// These check an access and report violations; check_global returns nullptr for an invalid access.
u8* check_global(Warp& w, Instruction& I, u64 address, u32 bytes, const char* what);
void check_grid_waited(Warp& w, const Instruction& I, const char* what);
void note_global_read(Warp& w, Instruction& I, u64 address, u32 bytes);
void write_global(Warp& w, Instruction& I, u64 address, u32 bytes, const u8* values);
void measure_sectors(Warp& w, Instruction& I, const u64* addresses, u32 mask, u32 bytes);

bool check_shared(Warp& w, const Instruction& I, u32 address, u32 bytes, u32 alignment, const char* what);
enum Proxy { GENERIC_PROXY, ASYNC_PROXY };
void note_shared_read(Warp& w, const Instruction& I, u32 address, u32 bytes, Proxy proxy = GENERIC_PROXY);
void note_readers(Warp& w, u32 address, u32 bytes);
// `values`: stored bytes; equal values from two warps are no race. `copy`: index of an asynchronous copy.
void note_shared_write(Warp& w, const Instruction& I, u32 address, u32 bytes, const u8* values, int copy = -1);
void measure_banks(Warp& w, Instruction& I, const u32* addresses, u32 mask, u32 bytes);
inline int shared_offset(u32 address) { return (int)(address - SHARED_BASE); }

// ---- asynchronous work ----

u32 new_copy(Warp& w, const Instruction& I);
void observe(Warp& w, u32 copy);  // records that the warp has waited for the copy
bool arrives_early();
void deliver(Cta& cta, Mbarrier& barrier, const TmaCopy& load);
void complete_phase(Mbarrier& barrier);
void finish_stores(Warp& w, size_t may_stay);

// Mode as packed by the stand-in driver: 0 none, 1 to 3 for 32, 64 and 128 bytes.
inline u32 swizzled(u32 address, u32 mode) {
  constexpr u32 bits[] = {0, 0x10, 0x30, 0x70};
  return address ^ (address >> 3 & bits[mode]);
}

// ---- matrices ----

int element_bytes(ElementType type);
float decode(u32 bits, ElementType type);
// Reads A [16, k] from registers; a register holds consecutive k.
void read_fragment_a(Warp& w, const Instruction& I, int first, int operands, float* a);
inline int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i >> 1 & 1); }
inline int accumulator_column(int lane, int i) { return 8 * (i >> 2) + lane % 4 * 2 + (i & 1); }

inline void require_all_lanes(Warp& w, const Instruction& I, u32 mask) {
  if (mask != ALL) report(w, I, "divergent-collective", "active lanes %#x", mask);
}

}  // namespace emulator
