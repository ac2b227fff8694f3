// Running a warp and a CTA.
#pragma once
#include "instructions.hpp"

namespace emulator {

// Runs a warp until it waits or ends, or for `portion` instructions; returns false if it only waits on.
bool run_warp(Warp& w, u64 portion);

}  // namespace emulator
