// Runs a launch: one CTA after another, until all of its warps have ended.
#include <cstdarg>
#include <cstdio>
#include <random>
#include "instructions.hpp"

namespace emulator {

Settings settings;
std::map<std::string, Report> reports;
u64 launch_number = 0;

static std::mt19937 generator;
static u64 scheduled_launches = 0;
constexpr size_t MOST_REPORTS = 400;
constexpr u8 POISON = 0xFF;  // in unwritten shared memory: NaN in every float format

void start_schedule(u32 seed, int early, bool reverse) {
  settings.seed = seed, settings.early = early, settings.reverse = reverse;
  scheduled_launches = 0;
}
bool flip_coin() { return settings.seed && (generator() & 1); }

// ---- reports ----

void report(const Kernel& kernel, const Instruction& I, const char* kind, const std::string& text) {
  const std::string line = I.line >= 0 ? kernel.lines[I.line] : "";
  Report& r = reports[kernel.name + "|" + kind + "|" + line + "|" + I.opcode];
  if (r.count++ == 0) r = {kind, kernel.name, line, text, I.text.substr(0, 160), 1};
}
void report(Warp& w, const Instruction& I, const char* kind, const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  report(*w.cta->launch->kernel, I, kind, std::string(text));
}

namespace {

const Instruction& last_executed(const Kernel& kernel, const Warp& w) { return kernel.code[std::max(0, w.stack.back().next - 1)]; }

void release(Cta& cta, u32 barrier) {
  for (auto& w : cta.warps)
    if (w.state == AT_BARRIER && w.barrier == barrier) w.state = READY;
  cta.epoch++, cta.sequence++;
  for (u32 copy : cta.observed) cta.copies[copy].observers = ALL;  // after a barrier, all warps see copies that one has waited for
  cta.observed.clear();
}

// Releases the barriers at which all warps have arrived; returns true if there was one.
bool release_barriers(Cta& cta) {
  const Kernel& kernel = *cta.launch->kernel;
  bool released = false;
  for (u32 barrier = 0; barrier < 16; barrier++) {
    int waiting = 0, live = 0, threads = 0;
    for (auto& w : cta.warps) {
      live += w.state != DONE;
      if (w.state == AT_BARRIER && w.barrier == barrier) waiting++, threads = last_executed(kernel, w).count;
    }
    if (!waiting || (threads ? waiting * 32 < threads : waiting != live)) continue;
    if (!threads && live < (int)cta.warps.size())
      report(kernel, kernel.code.back(), "barrier-after-exit", std::to_string(live) + " warps are at a barrier, the others have ended");
    release(cta, barrier);
    released = true;
  }
  return released;
}

void report_deadlock(Cta& cta) {
  std::string text;
  for (auto& w : cta.warps)
    if (w.state != DONE)
      text += "warp " + std::to_string(w.id) +
              (w.state == AT_BARRIER ? " at a barrier; " : " at the mbarrier of offset " + std::to_string(shared_offset(w.mbarrier)) + "; ");
  const Kernel& kernel = *cta.launch->kernel;
  for (auto& w : cta.warps)
    if (w.state != DONE) return report(kernel, kernel.code[w.stack.back().next], "deadlock", text);
}

void run_cta(Cta& cta) {
  std::vector<int> order(cta.warps.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  auto running = [&] { return std::any_of(cta.warps.begin(), cta.warps.end(), [](auto& w) { return w.state != DONE; }); };
  while (running()) {
    bool progress = false;
    if (settings.seed) std::shuffle(order.begin(), order.end(), generator);
    for (int i : order) {
      Warp& w = cta.warps[i];
      if (w.state == DONE || w.state == AT_BARRIER) continue;
      w.state = READY;
      progress |= run_warp(w, settings.seed ? 1 + generator() % 200 : ~0ull);
      if (cta.aborted) return;
    }
    progress |= release_barriers(cta);
    if (!progress && running()) return report_deadlock(cta);
  }
  const Kernel& kernel = *cta.launch->kernel;
  for (auto& [address, barrier] : cta.mbarriers)
    if (!barrier.loads.empty())
      report(kernel, kernel.code[barrier.loads[0].instruction], "tma-load-not-waited",
             std::to_string(barrier.loads.size()) + " loads are pending at the end");
}

void set_special(Warp& w, int which, auto value_of_lane) {
  if (const u32 slot = w.cta->launch->kernel->special_slots[which])
    for (int l = 0; l < 32; l++) w.registers[slot + l] = value_of_lane(l);
}

void create_warp(Cta& cta, int id) {
  const Launch& launch = *cta.launch;
  const Kernel& kernel = *launch.kernel;
  Warp& w = cta.warps[id];
  w.cta = &cta, w.id = id;
  w.file.resize(kernel.words + 2);
  w.registers = w.file.data();
  if ((u64)w.registers % 8) w.registers++;
  w.defined.resize(kernel.registers), w.in_flight.resize(kernel.registers), w.written_at.resize(kernel.registers);
  auto set_constant = [&](u32 slot64, u64 value) {  // the 32-bit copy follows the 64-bit one
    for (int l = 0; l < 32; l++) ((u64*)(w.registers + slot64))[l] = value, w.registers[slot64 + 64 + l] = (u32)value;
  };
  for (auto& [slot, value] : kernel.constants) set_constant(slot, value);
  for (auto& [slot, offset] : kernel.parameter_slots) set_constant(slot, (u64)launch.parameters + offset);
  const u32* block = launch.block;
  set_special(w, TID, [&](int l) { return (32 * id + l) % block[0]; });
  set_special(w, TID + 1, [&](int l) { return (32 * id + l) / block[0] % block[1]; });
  set_special(w, TID + 2, [&](int l) { return (32 * id + l) / block[0] / block[1]; });
  for (int d = 0; d < 3; d++) {
    set_special(w, NTID + d, [&](int) { return launch.block[d]; });
    set_special(w, NCTAID + d, [&](int) { return launch.grid[d]; });
  }
  set_special(w, LANEID, [](int l) { return l; });
  set_special(w, WARPID, [&](int) { return id; });
}

void start_warp(Warp& w) {
  w.state = READY, w.exited = 0;
  w.executed = w.wgmma_fence = 0;
  w.stack = {{0, -1, ALL}};
  std::fill(w.defined.begin(), w.defined.end(), 0);
  w.defined[0] = ALL;
  std::fill(w.written_at.begin(), w.written_at.end(), 0);
  std::fill(w.in_flight.begin(), w.in_flight.end(), 0);
  w.registers_in_flight = 0, w.tried = false, w.waited = !w.cta->launch->dependent;
  w.copies.clear(), w.stores.clear(), w.products.clear();
  for (int d = 0; d < 3; d++) set_special(w, CTAID + d, [&](int) { return w.cta->index[d]; });
}

}  // namespace

void execute(Launch& launch) {
  Kernel& kernel = *launch.kernel;
  launch_number++, kernel.launches++;
  if (settings.seed) generator.seed(settings.seed + scheduled_launches++);
  Instruction start;
  const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
  if (!kernel.errors.empty()) return report(kernel, start, "unsupported", kernel.errors.substr(0, 500));
  if (threads % 32) return report(kernel, start, "unsupported", "a block of " + std::to_string(threads) + " threads");
  Cta cta;
  cta.launch = &launch;
  cta.shared.resize(launch.shared_bytes);
  cta.shadows.resize(launch.shared_bytes / 2 + 8);
  cta.warps.resize(threads / 32);
  for (size_t i = 0; i < cta.warps.size(); i++) create_warp(cta, i);
  const u64 ctas = (u64)launch.grid[0] * launch.grid[1] * launch.grid[2];
  for (u64 n = 0; n < ctas && reports.size() <= MOST_REPORTS; n++) {
    const u64 id = settings.reverse ? ctas - 1 - n : n;
    cta.index[0] = id % launch.grid[0], cta.index[1] = id / launch.grid[0] % launch.grid[1];
    cta.index[2] = id / launch.grid[0] / launch.grid[1];
    cta.serial = id + 1, cta.measured = n == 0, cta.aborted = false;
    cta.first_epoch = ++cta.epoch;
    cta.copies.clear(), cta.observed.clear(), cta.mbarriers.clear();
    std::fill(cta.shared.begin(), cta.shared.end(), POISON);
    for (auto& w : cta.warps) start_warp(w);
    run_cta(cta);
    kernel.ctas++;
  }
}

}  // namespace emulator
