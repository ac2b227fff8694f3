// Declarations, scopes, labels and operands.
#include "parser.hpp"

namespace emulator {

std::string trim(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n"), last = text.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

Words split_list(const std::string& text) {
  Words items;
  std::string item;
  int depth = 0;
  for (char c : text) {
    depth += c == '{' || c == '[' || c == '(';
    depth -= c == '}' || c == ']' || c == ')';
    if (c == ',' && depth == 0) items.push_back(trim(item)), item.clear();
    else item += c;
  }
  if (!trim(item).empty()) items.push_back(trim(item));
  return items;
}

int type_bytes(const std::string& type) {
  if (type == "f32x2") return 8;
  if (type.ends_with("x2")) return type[0] == 'e' ? 2 : 4;
  if (type == "tf32") return 4;
  const size_t digits = type.find_first_of("0123456789");
  return digits == std::string::npos ? 0 : std::stoi(type.substr(digits)) / 8;
}

// ---- operands ----

constexpr u32 SINK = 64;  // words at the start of the register file, for writes to `_`

Operand Parser::constant(u64 value) {  // a 64-bit copy and a 32-bit copy, for 32 lanes each
  auto [known, fresh] = constant_slots.try_emplace(value, kernel->words);
  if (fresh) {
    kernel->constants.push_back({kernel->words, value});
    kernel->words += 96;
  }
  Operand o;
  o.constant = true, o.slot64 = known->second, o.slot = known->second + 64;
  return o;
}

Operand Parser::special(const std::string& name) {
  constexpr const char* NAMES[] = {"%tid.x",   "%tid.y",   "%tid.z",   "%ntid.x",   "%ntid.y",   "%ntid.z",   "%ctaid.x",
                                   "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid"};
  const auto found = std::find(std::begin(NAMES), std::end(NAMES), name);
  if (found == std::end(NAMES)) {
    error("special register " + name);
    return constant(0);
  }
  u32& slot = kernel->special_slots[found - NAMES];
  if (!slot) slot = kernel->words, kernel->words += 64;
  Operand o;
  o.slot = slot;
  return o;
}

Operand Parser::literal(std::string token) {
  if (token.back() == 'U') token.pop_back();
  const bool is_float = token.size() > 2 && token[0] == '0' && std::string("fFdD").find(token[1]) != std::string::npos;
  if (is_float) return constant(std::stoull(token.substr(2), nullptr, 16));
  return constant(token[0] == '-' ? (u64)std::stoll(token, nullptr, 0) : std::stoull(token, nullptr, 0));
}

Operand Parser::operand(std::string token) {
  token = trim(token);
  Operand o;
  if (token == "_") {
    o.discarded = true;
    return o;
  }
  if (token[0] == '!') {
    o = operand(token.substr(1));
    o.negated = true;
    return o;
  }
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope)
    if (auto found = scope->registers.find(token); found != scope->registers.end()) {
      o.cls = found->second.cls, o.slot = found->second.slot, o.number = found->second.number;
      return o;
    }
  if (token[0] == '%') return special(token);
  if (isdigit(token[0]) || token[0] == '-') return literal(token);
  if (token == "global_smem") return constant(SHARED_BASE);
  for (auto& parameter : kernel->parameters)
    if (parameter.name == token) {  // its address, which each launch fills in
      o = constant(0xABCD000000000000ull + parameter.offset);
      kernel->parameter_slots.push_back({o.slot64, parameter.offset});
      return o;
    }
  if (auto found = module_addresses.find(token); found != module_addresses.end()) return constant(found->second);
  error("operand " + token);
  return constant(0);
}

// [base + offset]; the base of a parameter is the start of all parameters.
Operand Parser::address(std::string token, i64& offset) {
  if (token.front() == '[') token = trim(token.substr(1, token.size() - 2));
  offset = 0;
  if (const size_t plus = token.find('+'); plus != std::string::npos) {
    offset = std::stoll(trim(token.substr(plus + 1)), nullptr, 0);
    token = trim(token.substr(0, plus));
  }
  for (auto& parameter : kernel->parameters)
    if (parameter.name == token) {
      offset += parameter.offset;
      return constant(0);
    }
  return operand(token);
}

// ---- declarations ----

void Parser::declare_module_data() {  // .global arrays, filled with zeros; Triton's kernels do not read them
  constexpr size_t BYTES = 4096;
  for (size_t start = 0; (start = text.find("\n.global ", start)) != std::string::npos; start++) {
    const size_t bracket = text.find('[', start);
    if (bracket == std::string::npos || bracket > text.find(';', start)) continue;
    const size_t name = text.find_last_of(" \t", bracket) + 1;
    kernel->module_data.push_back(std::make_unique<u8[]>(BYTES));
    module_addresses[text.substr(name, bracket - name)] = (u64)kernel->module_data.back().get();
  }
}

void Parser::declare_parameters(const std::string& list) {  // .param .align 64 .b8 name[128], .param .u64 .ptr .global name
  for (auto& declaration : split_list(list)) {
    u32 size = 0, alignment = 0;
    for (size_t dot = 0; (dot = declaration.find('.', dot)) != std::string::npos; dot++) {
      const std::string word = declaration.substr(dot + 1, declaration.find_first_of(" \t\n", dot) - dot - 1);
      if (word == "ptr") break;
      if (word == "align") alignment = std::stoi(declaration.substr(dot + 6));
      else if (const u32 bytes = type_bytes(word)) size = bytes;
    }
    std::string name = declaration.substr(declaration.find_last_of(" \t\n") + 1);
    if (const size_t bracket = name.find('['); bracket != std::string::npos) {
      size *= std::stoi(name.substr(bracket + 1));
      name = name.substr(0, bracket);
    }
    if (!alignment) alignment = size;
    u32& bytes = kernel->parameter_bytes;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    kernel->parameters.push_back({name, bytes, size});
    bytes += size;
  }
}

void Parser::declare_registers(const std::string& statement) {  // .reg .b32 %r<5>, .reg .pred a, b
  const size_t type_start = statement.find('.', 1) + 1, type_end = statement.find_first_of(" \t", type_start);
  const std::string type = statement.substr(type_start, type_end - type_start);
  const int bytes = type_bytes(type);
  if (bytes > 8) error("register type " + type);
  const RegisterClass cls = type == "pred" ? PREDICATE : bytes <= 2 ? B16 : bytes == 4 ? B32 : B64;
  auto add = [&](const std::string& name) {
    if (cls == B64) kernel->words = (kernel->words + 1) & ~1u;
    scopes.back().registers[name] = {cls, kernel->words, kernel->registers++};
    kernel->register_names.push_back(name);
    kernel->words += cls == PREDICATE ? 1 : cls == B64 ? 64 : 32;
  };
  for (auto& name : split_list(statement.substr(type_end))) {
    const size_t count = name.find('<');
    if (count == std::string::npos) add(name);
    else
      for (int i = 0, n = std::stoi(name.substr(count + 1)); i < n; i++) add(name.substr(0, count) + std::to_string(i));
  }
  kernel->words = (kernel->words + 31) & ~31u;
}

// ---- statements ----

std::string Parser::take_until(char end) {  // drops comments
  std::string taken;
  for (; position < text.size() && text[position] != end; position++) {
    if (at("//")) position = std::min(text.find('\n', position), text.size() - 1);
    taken += text[position];
  }
  position++;
  return trim(taken);
}

bool Parser::read_label() {
  size_t end = position;
  while (isalnum((unsigned char)text[end]) || text[end] == '_' || text[end] == '$') end++;
  if (end == position || text[end] != ':' || text[end + 1] == ':') return false;
  labels[{scopes.back().id, text.substr(position, end - position)}] = kernel->code.size();
  position = end + 1;
  return true;
}

void Parser::read_line_number() {  // Triton writes file and line as a comment after .loc
  const size_t end = std::min(text.find('\n', position), text.size()), comment = text.find("//", position);
  if (at(".loc") && comment < end) {
    const std::string words = trim(text.substr(comment + 2, end - comment - 2));
    auto [known, fresh] = line_numbers.try_emplace(words, kernel->lines.size());
    if (fresh) kernel->lines.push_back(words);
    line = known->second;
  }
  position = end;
}

void Parser::statement() {
  const char c = text[position];
  if (isspace((unsigned char)c) || c == ';') position++;
  else if (at("//")) position = std::min(text.find('\n', position), text.size());
  else if (c == '{') open_scope(), position++;
  else if (c == '}') scopes.pop_back(), position++;
  else if (at(".loc") || at(".file")) read_line_number();
  else if (c == '.') {
    const std::string declaration = take_until(';');
    if (declaration.starts_with(".reg")) declare_registers(declaration);
    else if (!declaration.starts_with(".pragma")) error("declaration " + declaration);
  } else if (!read_label()) decode(take_until(';'));
}

void Parser::resolve_jumps() {
  for (auto& jump : jumps) {
    int target = -1;
    for (auto scope = jump.scopes.rbegin(); scope != jump.scopes.rend() && target < 0; ++scope)
      if (auto found = labels.find({*scope, jump.label}); found != labels.end()) target = found->second;
    if (target < 0) error("label " + jump.label);
    kernel->code[jump.instruction].target = std::max(target, 0);
  }
}

std::unique_ptr<Kernel> Parser::run() {
  kernel->words = SINK;
  kernel->register_names.push_back("(constant)");
  declare_module_data();
  const size_t entry = text.find(".entry ");
  if (entry == std::string::npos) {
    error("no .entry");
    return std::move(kernel);
  }
  const size_t open = text.find('(', entry), close = text.find(')', open);
  kernel->name = trim(text.substr(entry + 7, open - entry - 7));
  declare_parameters(text.substr(open + 1, close - open - 1));
  position = text.find('{', close) + 1;
  open_scope();
  while (position < text.size() && !scopes.empty()) statement();
  Instruction end;
  end.kind = RETURN, end.opcode = end.text = "(end)";
  kernel->code.push_back(end);
  resolve_jumps();
  find_reconvergence_points(*kernel);
  return std::move(kernel);
}

std::unique_ptr<Kernel> parse(const std::string& text) { return Parser(text).run(); }

}  // namespace emulator
