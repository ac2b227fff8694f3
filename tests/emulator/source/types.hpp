// Data types that the parser, the instructions, the scheduler and the driver share.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr u32 ALL = ~0u;           // a mask of all 32 lanes
constexpr u32 SHARED_BASE = 1024;  // first shared address: hardware reserves 1 KiB

struct Warp;
struct Instruction;
using Run = void (*)(Warp&, Instruction&, u32 mask);

enum RegisterClass : u8 { PREDICATE, B16, B32, B64 };

// A slot of the register file: 32-bit words of all lanes. Constants and special registers have slots too.
struct Operand {
  u32 slot = 0;
  u32 slot64 = 0;  // 64-bit copy of a constant
  u32 number = 0;  // register number; 0 for constants, special registers and `_`, which are always defined
  RegisterClass cls = B32;
  bool negated = false, constant = false, discarded = false;
};

enum Kind : u8 { PLAIN, BRANCH, RETURN, BARRIER, TRY_WAIT, WGMMA, COLLECTIVE };

// The effect of undefined sources on an instruction.
enum Undefined : u8 {
  PASSED_ON,   // the result is undefined
  REPORTED,    // memory, addresses and matrix products
  OF_PARTNER,  // butterfly shuffle: that of the partner's value
  OF_CHOSEN,   // selp: that of the chosen value
  OF_AND,      // none if a predicate is false
  OF_OR,       // none if a predicate is true
  OF_ANY,      // packing: none unless all are undefined, because LLVM leaves unused halves undefined
};

enum Space : u8 { GLOBAL, SHARED, PARAMETER, GENERIC };
enum ElementType : u8 { BF16, F16, TF32, E4M3, E5M2, UNKNOWN_TYPE };
enum Atomic : u8 { ADD, MAX, MIN, EXCHANGE, COMPARE_AND_SWAP, OR, AND, XOR };
enum Shuffle : u8 { BUTTERFLY, INDEX, UP, DOWN };
enum Vote : u8 { BALLOT, ANY_LANE, ALL_LANES };

struct Allocation;

struct Statistics {
  u64 executed = 0, lanes = 0;
  // memory instructions in the first CTA of each launch
  u64 accesses = 0, wavefronts = 0, ideal_wavefronts = 0, bytes = 0, sectors = 0;
};

struct Instruction {
  Run run = nullptr;
  Kind kind = PLAIN;
  Undefined undefined = PASSED_ON;
  bool guarded = false;
  Operand guard;
  std::vector<Operand> operands;  // destinations, then sources
  u32 destinations = 0;
  i64 offset = 0, second_offset = 0;  // added to the first and second address

  Space space = GLOBAL;
  int bytes = 0, vector = 1;  // bytes per element in memory, elements per lane
  bool is_signed = false, is_float = false, transposed = false;
  int mode = 0;     // Atomic, Shuffle, Vote, comparison or rounding
  int combine = 0;  // setp with a third predicate: 1 and, 2 or, 3 xor
  int count = 0;    // matrices, coordinates, bytes of cp.async, groups that may stay pending, threads at a barrier

  ElementType type = UNKNOWN_TYPE;  // operands of mma and wgmma
  int n = 0, k = 0, a_operands = 0, b_operands = 0;
  bool half_accumulator = false, transposed_b = false, negated_a = false, negated_b = false;

  int target = -1, reconvergence = -1;  // of a branch
  int line = -1;                  // index into Kernel::lines
  std::string text, opcode;
  Statistics statistics;
  Allocation* allocation = nullptr;  // the last one used, and the launch that used it
  u64 allocation_launch = 0;
};

struct Parameter {
  std::string name;
  u32 offset, size;
};

struct Kernel {
  std::string name, errors;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  u32 parameter_bytes = 0;
  u32 words = 0, registers = 1;  // size of the register file, numbers of registers
  std::vector<std::string> register_names, lines;
  std::vector<std::pair<u32, u64>> constants;         // 64-bit slot, value
  std::vector<std::pair<u32, u32>> parameter_slots;   // 64-bit slot that holds the address of a parameter, its offset
  u32 special_slots[16] = {};                         // in the order of SPECIAL_REGISTERS; 0 where unused
  std::vector<std::unique_ptr<u8[]>> module_data;     // of .global variables
  u64 launches = 0, ctas = 0;
};

enum { TID, NTID = 3, CTAID = 6, NCTAID = 9, LANEID = 12, WARPID };

std::unique_ptr<Kernel> parse(const std::string& text);

// The history of two bytes of shared memory.
struct Shadow {
  u32 written = 0, read = 0;  // epochs
  u32 readers = 0;            // warps that read in that epoch
  u32 sequence = 0;           // Cta::sequence at the write, for fences
  u32 copy = 0;               // index into Cta::copies if an asynchronous copy wrote
  u8 writer = 0;
  bool asynchronous = false;
};

struct AsyncCopy {
  u32 observers;  // warps that have waited for it
  int instruction;
};

struct TmaCopy {
  u64 map;
  i32 coordinates[5];
  u32 shared, bytes, copy;
  int instruction;
  std::vector<u8> source;  // of a store: contents of shared memory when it was issued
};

struct Mbarrier {
  int count = 0, pending = 0;
  i64 bytes = 0;  // still expected
  u32 phase = 0;
  std::vector<TmaCopy> loads;                    // issued, not delivered
  std::vector<std::pair<u32, u32>> delivered;    // phase, copy
};

struct CpAsync {
  u32 shared, bytes, copy;
  u8 data[16];
};

struct Wgmma {
  Instruction* instruction;
  bool accumulates;
  u64 descriptor_a, descriptor_b;
  std::vector<u8> a, b;  // contents of the operands in shared memory when it was issued
};

// Asynchronous work of a warp: uncommitted work, and committed groups.
template <class T> struct Groups {
  std::vector<T> open;
  std::vector<std::vector<T>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  std::vector<T> take_oldest() {
    auto oldest = std::move(committed.front());
    committed.erase(committed.begin());
    return oldest;
  }
  bool empty() const {
    for (auto& group : committed)
      if (!group.empty()) return false;
    return open.empty();
  }
  void clear() { open.clear(), committed.clear(); }
};

enum State : u8 { READY, AT_BARRIER, AT_MBARRIER, DONE };

struct Frame {
  int next, reconvergence;
  u32 mask;
};

struct Cta;

struct Warp {
  Cta* cta = nullptr;
  int id = 0;
  State state = DONE;
  u32* registers = nullptr;
  std::vector<u32> file;
  std::vector<u32> defined;        // lanes, by register number
  std::vector<u64> written_at;     // value of `executed` at the last write, by register number
  std::vector<u8> in_flight;       // by register number: 1 accumulator, 2 operand A of a wgmma in flight
  int registers_in_flight = 0;
  std::vector<Frame> stack;
  u32 exited = 0;
  u64 executed = 0, wgmma_fence = 0;
  u32 proxy_fence = 0;             // Cta::sequence at the last fence
  u32 barrier = 0, mbarrier = 0;   // that it waits for
  bool tried = false;              // try_wait failed once
  bool waited = false;             // griddepcontrol.wait was executed
  Groups<CpAsync> copies;
  Groups<TmaCopy> stores;
  Groups<Wgmma> products;
};

struct Launch {
  Kernel* kernel;
  u32 grid[3], block[3], shared_bytes;
  u8* parameters;
  bool dependent;  // programmatic dependent launch
};

struct Cta {
  Launch* launch;
  u32 index[3], serial = 0;
  bool measured = false, aborted = false;
  std::vector<u8> shared;
  std::vector<Shadow> shadows;
  u32 first_epoch = 1, epoch = 1;  // a barrier begins the next epoch
  u32 sequence = 1;
  std::vector<AsyncCopy> copies;
  std::vector<u32> observed;  // copies waited for since the last barrier
  std::map<u32, Mbarrier> mbarriers;
  std::vector<Warp> warps;

  u8* at(u32 address) { return shared.data() + (address - SHARED_BASE); }
};

// ---- what the interface sets and reads ----

struct Settings {
  u32 seed = 0;         // 0: one warp after another, each until it waits; else random portions in random order
  int early = 0;        // asynchronous copies complete 0 as late as allowed, 1 at once, 2 at either time at random
  bool reverse = false; // run CTAs from the last to the first
  int fp8_bits = 0;     // significant bits of e4m3 and e5m2 sums in wgmma; 0: fp32
  bool (*find_allocation)(u64 address, u64* first, u64* end) = nullptr;
};

struct Report {
  std::string kind, kernel, line, text, instruction;
  u64 count = 0;
};

extern Settings settings;
extern u64 launch_number;
extern std::map<std::string, Report> reports;

void start_schedule(u32 seed, int early, bool reverse);
bool flip_coin();  // false without a random schedule
void execute(Launch& launch);
void report(Warp& w, const Instruction& I, const char* kind, const char* format, ...) __attribute__((format(printf, 4, 5)));
void report(const Kernel& kernel, const Instruction& I, const char* kind, const std::string& text);

}  // namespace emulator
