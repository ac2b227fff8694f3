// Parses PTX text to a kernel: scopes, names, operands and instructions.
#pragma once
#include <unordered_map>
#include "instructions.hpp"

namespace emulator {

std::string trim(const std::string& text);
Words split_list(const std::string& text);  // at commas outside brackets
int type_bytes(const std::string& type);    // PTX type without dot; 0 for pred and unknown types
inline bool has(const Words& opcode, const char* word) { return std::find(opcode.begin(), opcode.end(), word) != opcode.end(); }

class Parser {
 public:
  explicit Parser(const std::string& text) : text(text) {}
  std::unique_ptr<Kernel> run();

 private:
  struct Register {
    RegisterClass cls;
    u32 slot, number;
  };
  struct Scope {
    int id;
    std::unordered_map<std::string, Register> registers;
  };
  struct Jump {
    int instruction;
    std::string label;
    std::vector<int> scopes;
  };

  // parser.cpp
  void error(const std::string& what) { kernel->errors += what + "\n"; }
  bool at(const char* word) const { return text.compare(position, std::strlen(word), word) == 0; }
  std::string take_until(char end);
  void open_scope() { scopes.push_back({next_scope++, {}}); }
  void declare_module_data();
  void declare_parameters(const std::string& list);
  void declare_registers(const std::string& statement);
  bool read_label();
  void read_line_number();
  void statement();
  void resolve_jumps();
  Operand constant(u64 value);
  Operand special(const std::string& name);
  Operand literal(std::string token);
  Operand operand(std::string token);
  Operand address(std::string token, i64& offset);

  // decode.cpp
  using Decode = bool (Parser::*)(Instruction&, const Words& opcode, const Words& arguments);
  static const std::unordered_map<std::string, Decode> decoders;
  void decode(const std::string& statement);
  void add_operands(Instruction& I, const std::string& list);
  void add_destinations(Instruction& I, const std::string& list);
  void add_all(Instruction& I, const Words& arguments, size_t first);
  bool ignore(Instruction&, const Words&, const Words&);
  bool end_or_trap(Instruction&, const Words&, const Words&);
  bool branch(Instruction&, const Words&, const Words&);
  bool barrier(Instruction&, const Words&, const Words&);
  bool grid_control(Instruction&, const Words&, const Words&);
  bool fence(Instruction&, const Words&, const Words&);
  bool move(Instruction&, const Words&, const Words&);
  bool load(Instruction&, const Words&, const Words&);
  bool store(Instruction&, const Words&, const Words&);
  bool atomics(Instruction&, const Words&, const Words&);
  bool between_lanes(Instruction&, const Words&, const Words&);
  bool matrix_copy(Instruction&, const Words&, const Words&);
  bool async_copy(Instruction&, const Words&, const Words&);
  bool tensor_copy(Instruction&, const Words&, const Words&);
  bool mbarrier(Instruction&, const Words&, const Words&);
  bool matrix_product(Instruction&, const Words&, const Words&);
  bool warp_group_product(Instruction&, const Words&, const Words&);
  bool plain(Instruction&, const Words&, const Words&);

  const std::string& text;
  size_t position = 0;
  int line = -1, next_scope = 0;
  std::unique_ptr<Kernel> kernel = std::make_unique<Kernel>();
  std::vector<Scope> scopes;
  std::map<std::pair<int, std::string>, int> labels;  // (scope, name) -> instruction
  std::vector<Jump> jumps;
  std::map<u64, u32> constant_slots;
  std::unordered_map<std::string, u64> module_addresses;
  std::unordered_map<std::string, int> line_numbers;
};

void find_reconvergence_points(Kernel& kernel);  // control_flow.cpp

}  // namespace emulator
