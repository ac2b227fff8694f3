// Decodes statements to instructions. A decoder returns false for an unsupported instruction.
#include "parser.hpp"

namespace emulator {
namespace {

Words words_of(const std::string& opcode) {
  Words words(1);
  for (char c : opcode)
    if (c == '.') words.emplace_back();
    else words.back() += c;
  return words;
}
Words in_braces(const std::string& list) { return list[0] == '{' ? split_list(list.substr(1, list.size() - 2)) : Words{list}; }

// Returns the index of the first of these names in an opcode, or -1.
template <size_t count> int which(const Words& opcode, const char* const (&names)[count]) {
  for (size_t i = 0; i < count; i++)
    if (has(opcode, names[i])) return i;
  return -1;
}
ElementType element_type(const std::string& word) {
  constexpr const char* NAMES[] = {"bf16", "f16", "tf32", "e4m3", "e5m2"};
  return (ElementType)(std::find(std::begin(NAMES), std::end(NAMES), word) - NAMES);
}
int number_after(const std::string& shape, char letter) {  // m16n8k16
  const size_t at = shape.find(letter);
  return at == std::string::npos ? 0 : std::stoi(shape.substr(at + 1));
}

}  // namespace

const std::unordered_map<std::string, Parser::Decode> Parser::decoders = {
    {"bra", &Parser::branch}, {"ret", &Parser::end_or_trap}, {"exit", &Parser::end_or_trap}, {"trap", &Parser::end_or_trap},
    {"bar", &Parser::barrier}, {"barrier", &Parser::barrier}, {"fence", &Parser::fence}, {"membar", &Parser::ignore},
    {"griddepcontrol", &Parser::grid_control}, {"nanosleep", &Parser::ignore}, {"setmaxnreg", &Parser::ignore},
    {"prefetch", &Parser::ignore}, {"prefetchu", &Parser::ignore}, {"discard", &Parser::ignore},
    {"mov", &Parser::move}, {"cvta", &Parser::move}, {"ld", &Parser::load}, {"st", &Parser::store},
    {"atom", &Parser::atomics}, {"red", &Parser::atomics}, {"shfl", &Parser::between_lanes}, {"redux", &Parser::between_lanes},
    {"elect", &Parser::between_lanes}, {"vote", &Parser::between_lanes}, {"ldmatrix", &Parser::matrix_copy},
    {"stmatrix", &Parser::matrix_copy}, {"cp", &Parser::async_copy}, {"mbarrier", &Parser::mbarrier},
    {"mma", &Parser::matrix_product}, {"wgmma", &Parser::warp_group_product},
};

void Parser::decode(const std::string& statement) {
  if (statement.empty()) return;
  Instruction I;
  I.line = line, I.text = statement;
  std::replace_if(I.text.begin(), I.text.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
  std::string rest = I.text;
  if (rest[0] == '@') {
    const size_t end = rest.find(' ');
    I.guarded = true, I.guard = operand(rest.substr(1, end - 1));
    rest = trim(rest.substr(end));
  }
  const size_t end = std::min(rest.find(' '), rest.size());
  I.opcode = rest.substr(0, end);
  const Words opcode = words_of(I.opcode), arguments = split_list(rest.substr(end));
  auto found = decoders.find(opcode[0]);
  const Decode decoder = found == decoders.end() ? &Parser::plain : found->second;
  if (!(this->*decoder)(I, opcode, arguments)) error("instruction " + I.text);
  kernel->code.push_back(std::move(I));
}

// ---- operands ----

void Parser::add_operands(Instruction& I, const std::string& list) {  // a or {a, b}
  for (auto& token : in_braces(list)) I.operands.push_back(operand(token));
}
void Parser::add_destinations(Instruction& I, const std::string& list) {  // d, {d, e} or d|p
  const size_t bar = list.find('|');
  add_operands(I, list.substr(0, bar));
  if (bar != std::string::npos) add_operands(I, list.substr(bar + 1));
  I.destinations = I.operands.size();
}
void Parser::add_all(Instruction& I, const Words& arguments, size_t first) {
  for (size_t i = first; i < arguments.size(); i++) add_operands(I, arguments[i]);
}

// ---- control ----

bool Parser::ignore(Instruction&, const Words&, const Words&) { return true; }
bool Parser::end_or_trap(Instruction& I, const Words& opcode, const Words&) {
  if (opcode[0] == "trap") I.run = trap;
  else I.kind = RETURN;
  return true;
}
bool Parser::branch(Instruction& I, const Words&, const Words& arguments) {
  I.kind = BRANCH;
  jumps.push_back({(int)kernel->code.size(), arguments[0], {}});
  for (auto& scope : scopes) jumps.back().scopes.push_back(scope.id);
  return true;
}
bool Parser::barrier(Instruction& I, const Words& opcode, const Words& arguments) {
  if (has(opcode, "warp")) return true;  // bar.warp.sync: lanes run in lockstep
  if (!has(opcode, "sync")) return false;
  I.kind = BARRIER, I.count = arguments.size() > 1 ? std::stoi(arguments[1]) : 0;
  add_operands(I, arguments[0]);
  return true;
}
bool Parser::grid_control(Instruction& I, const Words& opcode, const Words&) {
  if (has(opcode, "wait")) I.run = wait_for_grid;
  return has(opcode, "wait") || has(opcode, "launch_dependents");  // grids run one after another
}
bool Parser::fence(Instruction& I, const Words& opcode, const Words&) {
  if (has(opcode, "proxy")) I.run = fence_proxy, I.kind = COLLECTIVE;
  return true;  // other fences: memory is written at once
}

// ---- moves, memory ----

bool Parser::move(Instruction& I, const Words& opcode, const Words& arguments) {
  const std::string &to = arguments[0], &from = arguments[1];
  I.bytes = opcode[0] == "cvta" ? 8 : type_bytes(opcode[1]);
  add_destinations(I, to);
  if (from[0] == '{') add_operands(I, from), I.run = pack, I.undefined = OF_ANY;
  else if (to[0] == '{') add_operands(I, from), I.run = unpack;
  else {
    i64 offset;
    I.operands.push_back(from.find('+') == std::string::npos ? operand(from) : address(from, offset));
    I.run = opcode[1] == "pred" ? arithmetic(opcode, 1) : I.bytes == 8 ? move64 : move32;
  }
  return true;
}

static void describe_access(Instruction& I, const Words& opcode) {
  I.space = has(opcode, "global") ? GLOBAL : has(opcode, "param") ? PARAMETER : GENERIC;
  for (auto& word : opcode)
    if (word.starts_with("shared")) I.space = SHARED;
  I.vector = has(opcode, "v2") ? 2 : has(opcode, "v4") ? 4 : has(opcode, "v8") ? 8 : 1;
  I.bytes = type_bytes(opcode.back());
  I.is_signed = opcode.back()[0] == 's', I.is_float = opcode.back()[0] == 'f';
  I.undefined = REPORTED;
}
bool Parser::load(Instruction& I, const Words& opcode, const Words& arguments) {
  describe_access(I, opcode);
  add_destinations(I, arguments[0]);
  I.operands.push_back(address(arguments[1], I.offset));
  I.run = I.space == PARAMETER ? load_parameter : I.space == SHARED ? load_shared : load_global;
  return I.bytes >= 1 && I.bytes <= 8;
}
bool Parser::store(Instruction& I, const Words& opcode, const Words& arguments) {
  describe_access(I, opcode);
  I.operands.push_back(address(arguments[0], I.offset));
  add_operands(I, arguments[1]);
  I.run = I.space == SHARED ? store_shared : store_global;
  return I.space != PARAMETER && I.bytes >= 1 && I.bytes <= 8;
}
bool Parser::atomics(Instruction& I, const Words& opcode, const Words& arguments) {
  describe_access(I, opcode);
  const size_t target = opcode[0] == "atom";
  if (target) add_destinations(I, arguments[0]);
  I.operands.push_back(address(arguments[target], I.offset));
  add_all(I, arguments, target + 1);
  I.mode = which(opcode, {"add", "max", "min", "exch", "cas", "or", "and", "xor"});
  I.run = atomic;
  const bool supported = I.is_float ? I.bytes == 4 && I.mode <= EXCHANGE : I.bytes == 4 || I.bytes == 8;
  return I.mode >= 0 && I.vector == 1 && supported;
}

// ---- exchange between lanes, 8 x 8 matrices ----

bool Parser::between_lanes(Instruction& I, const Words& opcode, const Words& arguments) {
  add_destinations(I, arguments[0]);
  add_all(I, arguments, 1);
  if (opcode[0] == "elect") I.run = elect;
  if (opcode[0] == "shfl") {
    I.run = shuffle, I.mode = which(opcode, {"bfly", "idx", "up", "down"});
    I.undefined = I.mode == BUTTERFLY ? OF_PARTNER : REPORTED;
  } else if (opcode[0] == "redux") {
    constexpr int MODES[] = {ADD, MAX, MIN, AND, OR, XOR};
    const int mode = which(opcode, {"add", "max", "min", "and", "or", "xor"});
    if (mode < 0 || opcode.back() == "f32") return false;
    I.run = reduce, I.mode = MODES[mode], I.is_signed = opcode.back() == "s32";
  } else if (opcode[0] == "vote") {
    I.run = vote, I.mode = which(opcode, {"ballot", "any", "all"}), I.undefined = REPORTED;
  }
  return I.mode >= 0;
}
bool Parser::matrix_copy(Instruction& I, const Words& opcode, const Words& arguments) {
  I.count = has(opcode, "x4") ? 4 : has(opcode, "x2") ? 2 : 1;
  I.transposed = has(opcode, "trans"), I.undefined = REPORTED;
  const bool loads = opcode[0] == "ldmatrix";
  if (loads) add_destinations(I, arguments[0]);
  I.operands.push_back(address(arguments[loads], I.offset));
  if (!loads) add_operands(I, arguments[1]);
  I.run = loads ? load_matrix : store_matrix;
  return opcode.back() == "b16" && has(opcode, "m8n8");
}

// ---- asynchronous copies ----

bool Parser::async_copy(Instruction& I, const Words& opcode, const Words& arguments) {
  if (opcode[1] != "async" || opcode[2] == "mbarrier") return false;
  const bool bulk = has(opcode, "bulk");
  I.kind = COLLECTIVE;
  if (has(opcode, "commit_group")) I.run = bulk ? bulk_commit : cp_async_commit;
  else if (has(opcode, "wait_group")) I.run = bulk ? bulk_wait : cp_async_wait, I.count = std::stoi(arguments[0]);
  else if (has(opcode, "wait_all")) I.run = cp_async_wait, I.count = -1;
  else {
    I.kind = PLAIN, I.undefined = REPORTED;
    if (bulk) return has(opcode, "tensor") && tensor_copy(I, opcode, arguments);
    I.operands = {address(arguments[0], I.offset), address(arguments[1], I.second_offset)};
    add_all(I, arguments, 3);
    I.count = std::stoi(arguments[2], nullptr, 0), I.run = cp_async;
  }
  return true;
}
bool Parser::tensor_copy(Instruction& I, const Words& opcode, const Words& arguments) {
  if (has(opcode, "im2col") || has(opcode, "multicast::cluster")) return false;
  const bool loads = arguments.size() > 2;  // [shared], [map, {coordinates}], [mbarrier] or [map, {coordinates}], [shared]
  const std::string& map = arguments[loads];
  const Words parts = split_list(map.substr(1, map.size() - 2));
  I.operands = {address(arguments[!loads], I.offset), operand(parts[0])};
  add_operands(I, parts[1]);
  I.count = I.operands.size() - 2;
  if (loads) I.operands.push_back(address(arguments[2], I.second_offset));
  I.run = loads ? tma_load : tma_store;
  return true;
}
bool Parser::mbarrier(Instruction& I, const Words& opcode, const Words& arguments) {
  I.undefined = REPORTED;
  const bool initialises = opcode[1] == "init", arrives = opcode[1] == "arrive", invalidates = opcode[1] == "inval";
  const bool waits = (opcode[1] == "try_wait" || opcode[1] == "test_wait") && has(opcode, "parity");
  if (arrives || waits) add_destinations(I, arguments[0]);
  I.operands.push_back(address(arguments[arrives || waits], I.offset));
  add_all(I, arguments, 1 + (arrives || waits));
  I.mode = has(opcode, "expect_tx");
  if (waits) I.kind = TRY_WAIT;
  I.run = initialises ? mbarrier_init : invalidates ? mbarrier_inval : arrives ? mbarrier_arrive : nullptr;
  return waits || I.run;
}

// ---- matrix products ----

bool Parser::matrix_product(Instruction& I, const Words& opcode, const Words& arguments) {
  const size_t words = opcode.size();  // mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
  I.type = element_type(opcode[words - 3]), I.k = number_after(opcode[3], 'k');
  I.half_accumulator = opcode[words - 4] == "f16";
  add_destinations(I, arguments[0]);
  I.a_operands = in_braces(arguments[1]).size(), I.b_operands = in_braces(arguments[2]).size();
  add_all(I, arguments, 1);
  I.undefined = REPORTED, I.run = mma;
  return opcode[3].starts_with("m16n8k") && I.type != UNKNOWN_TYPE && opcode[words - 2] == opcode[words - 3];
}
bool Parser::warp_group_product(Instruction& I, const Words& opcode, const Words& arguments) {
  if (!has(opcode, "mma_async")) {
    I.kind = COLLECTIVE;
    I.run = opcode[1] == "fence" ? wgmma_fence : opcode[1] == "commit_group" ? wgmma_commit : wgmma_wait;
    if (opcode[1] == "wait_group") I.count = std::stoi(arguments[0]);
    return true;
  }
  I.kind = WGMMA, I.run = wgmma_issue;
  I.type = element_type(opcode[opcode.size() - 2]);  // wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16
  I.n = number_after(opcode[4], 'n'), I.k = number_after(opcode[4], 'k');
  add_destinations(I, arguments[0]);
  I.a_operands = in_braces(arguments[1]).size();
  for (int i = 1; i < 4; i++) add_operands(I, arguments[i]);  // A, B, scale-d
  std::vector<int> flags;                                     // scale-a, scale-b, then transposed A (in shared memory) and B
  for (size_t i = 4; i < arguments.size(); i++) flags.push_back(std::stoi(arguments[i]));
  if (flags.size() >= 2) I.negated_a = flags[0] < 0, I.negated_b = flags[1] < 0;
  if (flags.size() == 4) I.transposed = flags[2];
  if (flags.size() > 2) I.transposed_b = flags.back();
  return I.type != UNKNOWN_TYPE && opcode[5] == "f32";
}

// ---- instructions on registers ----

bool Parser::plain(Instruction& I, const Words& opcode, const Words& arguments) {
  const std::string& name = opcode[0];
  I.run = name == "cvt" ? conversion(opcode, I) : name == "setp" ? comparison(opcode, I)
        : name == "selp" || name == "lop3" || name == "bfi" ? selection(opcode)
        : arithmetic(opcode, arguments.size() - 1);
  if (!I.run) return false;
  if (name == "selp") I.undefined = OF_CHOSEN;
  if (I.opcode == "and.pred") I.undefined = OF_AND;
  if (I.opcode == "or.pred") I.undefined = OF_OR;
  add_destinations(I, arguments[0]);
  add_all(I, arguments, 1);
  const bool half = opcode.back() == "f16" || opcode.back() == "bf16";
  return name != "setp" || !half || I.destinations == 1;
}

}  // namespace emulator
