// Runs one warp: divergence and reconvergence, barriers, undefined values, registers of wgmma in flight.
#include "instructions.hpp"

namespace emulator {
namespace {

const char* register_name(const Warp& w, u32 number) { return w.cta->launch->kernel->register_names[number].c_str(); }

void finish(Warp& w) {
  w.state = DONE;
  const Kernel& kernel = *w.cta->launch->kernel;
  if (!w.stores.empty())
    report(kernel, kernel.code.back(), "tma-store-not-waited", "a warp ends before its TMA stores have read shared memory");
  w.stores.commit();
  finish_stores(w, 0);
  if (!w.products.empty()) report(kernel, kernel.code.back(), "wgmma-not-waited", "a warp ends with wgmma in flight");
  if (!w.waited)
    report(kernel, kernel.code.back(), "grid-not-waited", "a warp ends without griddepcontrol.wait, and so may do before the previous grid");
}

// Returns the lanes whose result is defined. Called only if a source is undefined in some lane.
u32 defined_lanes(Warp& w, Instruction& I, u32 mask, u32 all_sources) {
  auto defined = [&](int i) { return w.defined[I.operands[i].number]; };
  switch (I.undefined) {
  case PASSED_ON: return all_sources;
  case REPORTED:
    for (u32 i = I.destinations; i < I.operands.size(); i++)
      if ((defined(i) & mask) != mask)
        report(w, I, "undefined-value-used", "%s in lanes %#x", register_name(w, I.operands[i].number), mask & ~defined(i));
    return ALL;
  case OF_PARTNER: {
    const u32 value = defined(I.destinations), distance = words(w, I, I.destinations + 1)[0] & 31;
    u32 result = 0;
    for (int l = 0; l < 32; l++) result |= (value >> (l ^ distance) & 1) << l;
    return result;
  }
  case OF_CHOSEN: {
    const u32 chosen = predicate(w, I, 3);
    return defined(3) & ((chosen & defined(1)) | (~chosen & defined(2)));
  }
  case OF_AND:
  case OF_OR: {
    const u32 decides = I.undefined == OF_AND ? 0 : ALL, a = predicate(w, I, 1), b = predicate(w, I, 2);
    return (defined(1) & defined(2)) | (defined(1) & ~(a ^ decides)) | (defined(2) & ~(b ^ decides));
  }
  case OF_ANY: {
    u32 result = 0;
    for (u32 i = I.destinations; i < I.operands.size(); i++) result |= defined(i);
    return result;
  }
  }
  return all_sources;
}

// PTX forbids using these registers. ptxas either removes the copy, or serializes all wgmma of the function (C7515);
// the emulator continues as if serialized.
void check_in_flight(Warp& w, Instruction& I) {
  for (u32 i = 0; i < I.operands.size(); i++) {
    const u32 number = I.operands[i].number;
    const bool written = i < I.destinations;
    if (!number || !w.in_flight[number] || (w.in_flight[number] == 2 && !written)) continue;
    report(w, I, "register-of-wgmma-in-flight", "%s is %s before wgmma.wait_group: ask ptxas -v for C7515",
           register_name(w, number), written ? "written" : "read");
    w.products.commit();
    wait_for_products(w, 0);
    return;
  }
}

void branch(Warp& w, const Instruction& I, u32 taken, u32 active) {
  Frame& frame = w.stack.back();
  if (taken == active) frame.next = I.target;
  else if (!taken) frame.next++;
  else {
    const int fallen_through = frame.next + 1;
    frame.next = I.reconvergence;
    if (fallen_through != I.reconvergence) w.stack.push_back({fallen_through, I.reconvergence, active & ~taken});
    if (I.target != I.reconvergence) w.stack.push_back({I.target, I.reconvergence, taken});
  }
}

void run_instruction(Warp& w, Instruction& I, u32 mask) {
  u32 defined = ALL;
  if (I.kind != WGMMA) {
    for (u32 i = I.destinations; i < I.operands.size(); i++) defined &= w.defined[I.operands[i].number];
    if (mask & ~defined) defined = defined_lanes(w, I, mask, defined);
    if (w.registers_in_flight) check_in_flight(w, I);
  }
  I.run(w, I, mask);
  for (u32 i = 0; i < I.destinations; i++) {
    const u32 number = I.operands[i].number;
    if (number) w.defined[number] = (w.defined[number] & ~mask) | (mask & defined);
    if (I.kind != WGMMA) w.written_at[number] = w.executed;
  }
}

}  // namespace

bool run_warp(Warp& w, u64 portion) {
  Kernel& kernel = *w.cta->launch->kernel;
  bool progress = false;
  while (portion--) {
    if (w.cta->aborted) {
      w.state = DONE;
      return true;
    }
    while (w.stack.size() > 1 && w.stack.back().next == w.stack.back().reconvergence) w.stack.pop_back();
    Frame& frame = w.stack.back();
    const u32 active = frame.mask & ~w.exited;
    if (!active) {
      if (w.stack.size() == 1) {
        finish(w);
        return true;
      }
      w.stack.pop_back();
      continue;
    }
    Instruction& I = kernel.code[frame.next];
    const u32 mask = I.guarded ? active & predicate(w, I.guard) : active;
    if (I.guarded && active & ~w.defined[I.guard.number])
      report(w, I, "undefined-value-used", "guard %s", register_name(w, I.guard.number));
    I.statistics.executed++, I.statistics.lanes += std::popcount(mask);
    w.executed++;
    if (I.kind == TRY_WAIT && mask) {
      const bool done = mbarrier_try_wait(w, I, mask);
      w.defined[I.operands[0].number] |= mask;
      if (!done && w.tried) {
        w.state = AT_MBARRIER;
        return progress;
      }
      w.tried = !done;
    }
    progress = true;
    if (I.kind == BRANCH) {
      branch(w, I, mask, active);
      continue;
    }
    frame.next++;
    if (I.kind == RETURN) {
      w.exited |= mask;
    } else if (I.kind == BARRIER && mask) {
      if (mask != ALL) report(w, I, "barrier-divergence", "warp %d arrives with lanes %#x", w.id, mask);
      w.state = AT_BARRIER, w.barrier = words(w, I, 0)[0];
      return true;
    } else if (I.run && (mask || I.kind == COLLECTIVE)) {
      run_instruction(w, I, mask);
    }
  }
  return progress;
}

}  // namespace emulator
