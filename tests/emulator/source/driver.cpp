// Driver functions that load and launch kernels, and the interface for Python.
//
// The stand-in driver checks each call; this file executes the launch. A module image is "\177ELF" "PTX" and the text of
// the PTX, which `process.py` makes Triton write in place of a cubin.
#include <cuda.h>
#include <dlfcn.h>
#include <mutex>
#include <utility>
#include "instructions.hpp"

extern "C" {
CUresult checked_cuModuleLoadData(CUmodule*, const void*);
CUresult checked_cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**);
}

namespace {

using namespace emulator;

struct RecordedLaunch {
  Launch launch;
  std::vector<u64> parameters;
};

std::map<void*, Kernel*> modules;
std::map<std::string, int> kernel_numbers;  // by PTX
std::vector<std::unique_ptr<Kernel>> kernels;
std::vector<RecordedLaunch> recorded;
bool recording = false;
std::mutex lock;
std::string answer;

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += (unsigned char)c < 32 ? ' ' : c;
  }
  return result + "\"";
}
template <class... T> std::string array(const T&... items) {
  std::string result;
  ((result += (result.empty() ? "" : ",") + items), ...);
  return "[" + result + "]";
}
void append(std::string& list, const std::string& item) { list += (list.empty() ? "" : ",") + item; }
const char* reply(const std::string& list) { return (answer = "[" + list + "]").c_str(); }
std::string number(auto value) { return std::to_string(value); }

bool is_dependent(const CUlaunchConfig& c) {
  for (unsigned i = 0; i < c.numAttrs; i++)
    if (c.attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) return c.attrs[i].value.programmaticStreamSerializationAllowed;
  return false;
}

void run(RecordedLaunch& r) {
  if (!settings.find_allocation)
    settings.find_allocation = (bool (*)(u64, u64*, u64*))dlsym(RTLD_DEFAULT, "emulator_find_allocation");
  r.launch.parameters = (u8*)(((u64)r.parameters.data() + 63) & ~63ull);  // aligns tensor maps to 64 bytes
  execute(r.launch);
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const CUresult result = checked_cuModuleLoadData(module, image);
  if (result != CUDA_SUCCESS || std::memcmp((const char*)image + 4, "PTX", 3)) return result;
  std::lock_guard hold(lock);
  const std::string ptx = (const char*)image + 7;
  auto [known, fresh] = kernel_numbers.try_emplace(ptx, kernels.size());
  if (fresh) kernels.push_back(parse(ptx));
  modules[*module] = kernels[known->second].get();
  return result;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
  const CUresult result = checked_cuLaunchKernelEx(c, function, parameters, extra);
  std::lock_guard hold(lock);
  auto module = modules.find(function);
  if (result != CUDA_SUCCESS || module == modules.end()) return result;
  Kernel* kernel = module->second;
  RecordedLaunch r{{kernel, {c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, nullptr, is_dependent(*c)},
                   std::vector<u64>(kernel->parameter_bytes / 8 + 17)};
  const u64 aligned = (((u64)r.parameters.data() + 63) & ~63ull);
  for (size_t i = 0; i < kernel->parameters.size(); i++)
    std::memcpy((u8*)aligned + kernel->parameters[i].offset, parameters[i], kernel->parameters[i].size);
  if (recording) recorded.push_back(std::move(r));
  else run(r);
  return result;
}

// As a CUDA graph: records launches without executing them; a replay executes them.
void emulator_record(int on) {
  std::lock_guard hold(lock);
  if (on) recorded.clear();
  recording = on;
}
void emulator_replay() {
  std::lock_guard hold(lock);
  for (auto& r : recorded) run(r);
}

void emulator_schedule(unsigned seed, int early, int reverse) { start_schedule(seed, early, reverse); }
void emulator_set_fp8_bits(int bits) { settings.fp8_bits = bits; }
void emulator_set_allocations(bool (*find)(u64, u64*, u64*)) { settings.find_allocation = find; }

// [[kind, kernel, line, instruction, text, count], ...] since the last call.
const char* emulator_reports() {
  std::lock_guard hold(lock);
  std::string list;
  for (auto& [key, r] : reports)
    append(list, array(quoted(r.kind), quoted(r.kernel), quoted(r.line), quoted(r.instruction), quoted(r.text), number(r.count)));
  reports.clear();
  return reply(list);
}
// For each kernel executed since the last call: [name, launches, CTAs, [[index, opcode, line, executed, lanes, accesses,
// wavefronts, ideal wavefronts, bytes, sectors], ...]].
const char* emulator_profile() {
  std::lock_guard hold(lock);
  std::string list;
  for (auto& kernel : kernels) {
    if (!kernel->launches) continue;
    std::string rows;
    for (size_t i = 0; i < kernel->code.size(); i++) {
      Instruction& I = kernel->code[i];
      const Statistics s = std::exchange(I.statistics, {});
      if (s.executed)
        append(rows, array(number(i), quoted(I.opcode), quoted(I.line >= 0 ? kernel->lines[I.line] : ""), number(s.executed), number(s.lanes),
                           number(s.accesses), number(s.wavefronts), number(s.ideal_wavefronts), number(s.bytes), number(s.sectors)));
    }
    append(list, array(quoted(kernel->name), number(kernel->launches), number(kernel->ctas), "[" + rows + "]"));
    kernel->launches = kernel->ctas = 0;
  }
  return reply(list);
}
// [[kernel, its name, index, opcode, line, executed], ...] of instructions whose opcode contains a word.
const char* emulator_find(const char* word) {
  std::lock_guard hold(lock);
  std::string list;
  for (size_t k = 0; k < kernels.size(); k++)
    for (size_t i = 0; i < kernels[k]->code.size(); i++)
      if (const Instruction& I = kernels[k]->code[i]; I.opcode.find(word) != std::string::npos)
        append(list, array(number(k), quoted(kernels[k]->name), number(i), quoted(I.opcode),
                           quoted(I.line >= 0 ? kernels[k]->lines[I.line] : ""), number(I.statistics.executed)));
  return reply(list);
}

}  // extern "C"
