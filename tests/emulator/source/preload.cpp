// Loaded before everything (LD_PRELOAD): knows the live memory of posix_memalign, where torch's CPU tensors lie.
//
// So the emulator can tell an address that belongs to no tensor. Fresh memory is filled with NaN.
#include <dlfcn.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr size_t ALIGNMENT = 64;  // torch's

struct Live {
  std::mutex lock;
  std::map<uintptr_t, size_t> sizes;  // by address
  std::vector<void*> held;
  bool holding = false;
};
Live& live() {
  static Live* made = new Live;  // never destroyed: memory is freed until the very end
  return *made;
}

// The containers above free memory too.
__attribute__((tls_model("initial-exec"))) thread_local bool inside = false;
struct Inside {
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

template <class F> F* next(const char* name) { return (F*)dlsym(RTLD_NEXT, name); }

}  // namespace

extern "C" {

int posix_memalign(void** out, size_t alignment, size_t size) {
  static auto* const original = next<int(void**, size_t, size_t)>("posix_memalign");
  const int result = original(out, alignment, size);
  if (result == 0 && alignment >= ALIGNMENT && size) {
    std::memset(*out, 0xFF, size);
    Inside guard;
    std::lock_guard hold(live().lock);
    live().sizes[(uintptr_t)*out] = size;
  }
  return result;
}

void free(void* memory) {
  static auto* const original = next<void(void*)>("free");
  if (memory && (uintptr_t)memory % ALIGNMENT == 0 && !inside) {
    Inside guard;
    std::lock_guard hold(live().lock);
    if (auto found = live().sizes.find((uintptr_t)memory); found != live().sizes.end()) {
      if (live().holding) {
        live().held.push_back(memory);
        return;
      }
      live().sizes.erase(found);
    }
  }
  original(memory);
}

// The live allocation that holds an address.
bool emulator_find_allocation(uint64_t address, uint64_t* first, uint64_t* end) {
  std::lock_guard hold(live().lock);
  auto after = live().sizes.upper_bound(address);
  if (after == live().sizes.begin()) return false;
  auto [start, size] = *--after;
  *first = start, *end = start + size;
  return address < *end;
}

// While it holds, freed memory stays live, as in the memory pool of a CUDA graph.
void emulator_hold_memory(int on) {
  std::vector<void*> held;
  {
    std::lock_guard hold(live().lock);
    live().holding = on;
    held.swap(live().held);
  }
  for (void* memory : held) free(memory);
}

}  // extern "C"
