// Loaded first (LD_PRELOAD): tracks memory of posix_memalign, which torch uses for CPU tensors, and fills it with NaN.
//
// This tells the emulator which addresses belong to no tensor.
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
  static Live* made = new Live;  // never destroyed, because memory is freed until the process ends
  return *made;
}

// Set while the containers above free memory themselves.
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

// Finds the live allocation that contains an address.
bool emulator_find_allocation(uint64_t address, uint64_t* first, uint64_t* end) {
  std::lock_guard hold(live().lock);
  auto after = live().sizes.upper_bound(address);
  if (after == live().sizes.begin()) return false;
  auto [start, size] = *--after;
  *first = start, *end = start + size;
  return address < *end;
}

// While on, freed memory stays live, as in the memory pool of a CUDA graph.
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
