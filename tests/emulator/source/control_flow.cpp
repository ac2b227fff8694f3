// Reconvergence points of divergent branches: their immediate post-dominators.
#include "parser.hpp"

namespace emulator {

void find_reconvergence_points(Kernel& kernel) {
  auto& code = kernel.code;
  const int size = code.size();
  std::vector<bool> begins(size + 1);
  begins[0] = true;
  for (int i = 0; i < size; i++)
    if (code[i].kind == BRANCH || code[i].kind == RETURN) {
      begins[i + 1] = true;
      if (code[i].target >= 0) begins[code[i].target] = true;
    }
  std::vector<int> first, block_of(size);  // of basic blocks
  for (int i = 0; i < size; i++) {
    if (begins[i]) first.push_back(i);
    block_of[i] = first.size() - 1;
  }
  const int blocks = first.size(), exit = blocks;
  auto last = [&](int block) { return (block + 1 < blocks ? first[block + 1] : size) - 1; };
  std::vector<std::vector<int>> next(blocks);
  for (int b = 0; b < blocks; b++) {
    const Instruction& I = code[last(b)];
    if (I.kind == BRANCH) next[b].push_back(block_of[I.target]);
    if (I.kind == RETURN) next[b].push_back(exit);
    if ((I.kind != BRANCH && I.kind != RETURN) || I.guarded) next[b].push_back(b + 1);
  }
  // dominated_by[b][d]: every path from b to the exit passes d
  std::vector<std::vector<bool>> dominated_by(blocks + 1, std::vector<bool>(blocks + 1, true));
  dominated_by[exit].assign(blocks + 1, false);
  dominated_by[exit][exit] = true;
  for (bool changed = true; changed;) {
    changed = false;
    for (int b = blocks - 1; b >= 0; b--) {
      std::vector<bool> common(blocks + 1, true);
      for (int n : next[b])
        for (int i = 0; i <= blocks; i++) common[i] = common[i] && dominated_by[n][i];
      common[b] = true;
      if (common != dominated_by[b]) dominated_by[b] = common, changed = true;
    }
  }
  for (int b = 0; b < blocks; b++) {
    if (code[last(b)].kind != BRANCH) continue;
    int nearest = exit;  // the post-dominator with the most post-dominators
    auto count = [&](int block) { return std::count(dominated_by[block].begin(), dominated_by[block].end(), true); };
    for (int i = 0; i < blocks; i++)
      if (i != b && dominated_by[b][i] && count(i) > count(nearest)) nearest = i;
    code[last(b)].reconvergence = nearest == exit ? size - 1 : first[nearest];
  }
}

}  // namespace emulator
