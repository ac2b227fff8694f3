// wgmma: each warp of a warp group computes 16 rows of the product, at the wait.
#include "instructions.hpp"
#include "product.hpp"

namespace emulator {
namespace {

constexpr int K_BYTES = 32;  // of K, in every type
constexpr int STRIDE = 256;  // maximum columns

// An operand in shared memory, described by a matrix descriptor.
struct SharedOperand {
  u32 start, leading, stride, swizzle;
  int element, rows, first;  // bytes per element; rows (M or N), and the first row
  bool transposed;           // MN-major

  SharedOperand(const Instruction& I, u64 descriptor, int rows, int first, bool transposed)
      : start((descriptor & 0x3FFF) << 4), leading((descriptor >> 16 & 0x3FFF) << 4), stride((descriptor >> 32 & 0x3FFF) << 4),
        swizzle((4 - (descriptor >> 62 & 3)) & 3), element(element_bytes(I.type)), rows(rows), first(first), transposed(transposed) {}

  // Calls f(address, row, byte of K) for each 16 bytes: of one row or, if transposed, of several rows at one k.
  template <class F> void each_chunk(F f) const {
    const u32 span = swizzle ? 16u << swizzle : 16;  // contiguous bytes
    if (!transposed) {
      for (int row = 0; row < rows; row++)
        for (u32 half = 0; half < 2; half++) {
          const u32 r = first + row, within = swizzle ? half * 16 : half * leading;
          f(swizzled(start + r % 8 * span + r / 8 * stride + within, swizzle), row, (int)half * 16);
        }
    } else {
      const u32 width = span / element;
      for (int k = 0; k < K_BYTES / element; k++)
        for (int row = 0; row < rows; row += 16 / element) {
          const u32 r = first + row;
          const u32 across = swizzle ? leading : stride, along = swizzle ? stride : leading;
          f(swizzled(start + r % width * element + r / width * across + k % 8 * span + k / 8 * along, swizzle), row, k * element);
        }
    }
  }

  // Returns a copy [rows][32 bytes of K].
  std::vector<u8> gather(Warp& w, const Instruction& I, bool issued) const {
    std::vector<u8> bytes(rows * K_BYTES);
    each_chunk([&](u32 address, int row, int k) {
      if (!check_shared(w, I, address, 16, 16, "wgmma")) return;
      if (issued) note_shared_read(w, I, address, 16, ASYNC_PROXY);
      else note_readers(w, address, 16);
      const u8* from = w.cta->at(address);
      if (!transposed) std::memcpy(&bytes[row * K_BYTES + k], from, 16);
      else
        for (int e = 0; e < 16 / element; e++) std::memcpy(&bytes[(row + e) * K_BYTES + k], from + e * element, element);
    });
    return bytes;
  }
};
SharedOperand operand_a(Warp& w, const Instruction& I, u64 descriptor) {
  return SharedOperand(I, descriptor, 16, 16 * (w.id % 4), I.transposed);
}
SharedOperand operand_b(const Instruction& I, u64 descriptor) { return SharedOperand(I, descriptor, I.n, 0, I.transposed_b); }

int first_a(const Instruction& I) { return I.destinations; }
bool a_in_shared(const Instruction& I) { return I.a_operands == 1; }

void mark_in_flight(Warp& w, const Instruction& I) {
  const int last = I.destinations + (a_in_shared(I) ? 0 : I.a_operands);
  for (int i = 0; i < last; i++)
    if (const u32 r = I.operands[i].number) {
      w.registers_in_flight += !w.in_flight[r];
      w.in_flight[r] |= i < (int)I.destinations ? 1 : 2;
    }
}

void perform(Warp& w, const Wgmma& product) {
  const Instruction& I = *product.instruction;
  const int bytes = element_bytes(I.type), k = I.k;
  static float a[16 * 32], b[32 * STRIDE], c[16 * STRIDE];
  auto element = [&](const std::vector<u8>& from, int row, int k) {
    u32 bits = 0;
    std::memcpy(&bits, &from[row * K_BYTES + k * bytes], bytes);
    return decode(bits, I.type);
  };
  if (a_in_shared(I)) {
    const auto now = operand_a(w, I, product.descriptor_a).gather(w, I, false);
    if (now != product.a) report(w, I, "shared-changed-under-wgmma", "operand A was overwritten between issue and wait");
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < k; j++) a[i * k + j] = element(now, i, j);
  } else read_fragment_a(w, I, first_a(I), I.a_operands, a);
  const auto now = operand_b(I, product.descriptor_b).gather(w, I, false);
  if (now != product.b) report(w, I, "shared-changed-under-wgmma", "operand B was overwritten between issue and wait");
  for (int i = 0; i < I.n; i++)
    for (int j = 0; j < k; j++) b[j * STRIDE + i] = element(now, i, j);
  if (I.negated_a != I.negated_b)
    for (float& value : a) value = -value;
  auto at = [&](int lane, int i) -> float& { return c[accumulator_row(lane, i) * STRIDE + accumulator_column(lane, i)]; };
  for (u32 i = 0; i < I.destinations; i++)
    for (int l = 0; l < 32; l++) at(l, i) = product.accumulates ? std::bit_cast<float>(words(w, I, i)[l]) : 0;
  if (settings.fp8_bits && bytes == 1) multiply_short(a, b, c, k, I.n, STRIDE, settings.fp8_bits);
  else
    for (int i = 0; i < I.n; i += 8) multiply<8>(a, b + i, c + i, k, STRIDE);
  for (u32 i = 0; i < I.destinations; i++)
    for (int l = 0; l < 32; l++) words(w, I, i)[l] = std::bit_cast<u32>(at(l, i));
}

}  // namespace

void wgmma_issue(Warp& w, Instruction& I, u32 mask) {
  require_all_lanes(w, I, mask);
  const int a = first_a(I), b = a + I.a_operands;
  const Operand& scale = I.operands[b + 1];
  Wgmma product{};
  product.instruction = &I;
  product.accumulates = (scale.cls == PREDICATE || scale.constant ? predicate(w, scale) : words(w, scale)[0]) & 1;
  if (w.wgmma_fence == 0) report(w, I, "wgmma-without-fence", "no wgmma.fence before the first");
  auto require_fence = [&](int first, int count, const char* what) {
    for (int i = first; i < first + count; i++)
      if (const u32 r = I.operands[i].number; r && w.written_at[r] > w.wgmma_fence && !w.in_flight[r])
        report(w, I, "wgmma-without-fence", "%s register %s was written after the last wgmma.fence", what,
               w.cta->launch->kernel->register_names[r].c_str());
  };
  if (product.accumulates) require_fence(0, I.destinations, "accumulator");
  if (a_in_shared(I)) {
    product.descriptor_a = longs(w, I, a)[0];
    product.a = operand_a(w, I, product.descriptor_a).gather(w, I, true);
  } else require_fence(a, I.a_operands, "A");
  product.descriptor_b = longs(w, I, b)[0];
  product.b = operand_b(I, product.descriptor_b).gather(w, I, true);
  if ((product.descriptor_a | product.descriptor_b) >> 49 & 7) report(w, I, "wgmma-descriptor", "base offsets are not supported");
  mark_in_flight(w, I);
  w.products.open.push_back(std::move(product));
}
void wgmma_fence(Warp& w, Instruction&, u32) { w.wgmma_fence = w.executed; }
void wgmma_commit(Warp& w, Instruction&, u32) { w.products.commit(); }

void wait_for_products(Warp& w, size_t may_stay) {
  while (w.products.committed.size() > may_stay)
    for (auto& product : w.products.take_oldest()) perform(w, product);
  std::fill(w.in_flight.begin(), w.in_flight.end(), 0);
  w.registers_in_flight = 0;
  for (auto& group : w.products.committed)
    for (auto& product : group) mark_in_flight(w, *product.instruction);
  for (auto& product : w.products.open) mark_in_flight(w, *product.instruction);
  w.cta->sequence++;
}
void wgmma_wait(Warp& w, Instruction& I, u32) { wait_for_products(w, I.count); }

}  // namespace emulator
