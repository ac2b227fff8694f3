/* Classifies images with an exported ONNX file, using only ONNX Runtime's C++ API.

       vit-fast export vit_base_patch16_224 --weights W -o vit.onnx --preprocess --returns probabilities
       g++ -std=c++17 -O2 -I $ORT/include examples/onnx_client.cpp -L $ORT/lib -Wl,-rpath,$ORT/lib -lonnxruntime \
           -o onnx_client
       ./onnx_client vit.onnx image.ppm

   ORT is the unpacked release of ONNX Runtime 1.14 or newer, from github.com/microsoft/onnxruntime/releases.

   A model exported with --preprocess takes images of any size: binary PPM for RGB, PGM for gray, as written by
   `convert image.jpg image.ppm`. In your own program, pass the pixels of your decoder or camera instead. Any other
   model takes preprocessed images: raw fp32 [channels, height, width] in native byte order, as written by numpy's
   `tofile`. The class names are read from the model. */

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <onnxruntime_cxx_api.h>

namespace {

constexpr std::size_t kTop = 5;

/// The input for one image, a batch of one. Either `pixels` or `floats` contains the values.
struct Image {
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> pixels;
  std::vector<float> floats;
};

std::string Utf8(std::uint32_t code) {
  std::string text;
  if (code < 0x80) return {static_cast<char>(code)};
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes after the first
  text += static_cast<char>((0xFF00 >> (more + 1) & 0xFF) | code >> 6 * more);
  for (int i = more - 1; i >= 0; --i) text += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
  return text;
}

/// Parses a JSON list of strings as written by the export: ASCII, other characters as \uXXXX.
std::vector<std::string> Strings(const std::string& json) {
  std::vector<std::string> strings;
  const std::string plain = "bfnrt", meant = "\b\f\n\r\t";
  for (std::size_t at = json.find('"'); at != std::string::npos; at = json.find('"', at + 1)) {
    std::string text;
    while (json.at(++at) != '"') {
      if (json[at] != '\\') {
        text += json[at];
      } else if (json.at(++at) == 'u') {
        auto unit = [&] { return static_cast<std::uint32_t>(std::stoul(json.substr(at + 1, 4), nullptr, 16)); };
        std::uint32_t code = unit();
        at += 4;
        if (code >= 0xD800 && code < 0xDC00) {  // the first half of a pair
          at += 2;
          code = 0x10000 + ((code - 0xD800) << 10) + (unit() - 0xDC00);
          at += 4;
        }
        text += Utf8(code);
      } else {
        const std::size_t found = plain.find(json[at]);
        text += found == std::string::npos ? json[at] : meant[found];
      }
    }
    strings.push_back(text);
  }
  return strings;
}

/// Reads a binary 8-bit PPM or PGM file as [1, height, width, channels].
Image ReadPixels(const std::string& path, std::int64_t channels) {
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  const auto number = [&] {
    while ((file >> std::ws).peek() == '#') file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    std::int64_t value = 0;
    file >> value;
    return value;
  };
  file >> kind;
  const std::int64_t width = number(), height = number(), most = number();
  const std::string expected = channels == 1 ? "P5" : "P6";
  constexpr std::int64_t kLongest = 1 << 14;
  if (!file || kind != expected || most != 255 || std::min(width, height) < 1 || std::max(width, height) > kLongest)
    throw std::runtime_error(path + ": must be a binary 8-bit " + (channels == 1 ? "PGM" : "PPM") + " file (" +
                             expected + ")");
  file.get();
  Image image{{1, height, width, channels}, std::vector<std::uint8_t>(height * width * channels), {}};
  if (!file.read(reinterpret_cast<char*>(image.pixels.data()), image.pixels.size()))
    throw std::runtime_error(path + ": ends before its last pixel");
  return image;
}

/// Reads raw fp32 values of shape [1, channels, height, width].
Image ReadFloats(const std::string& path, const std::vector<std::int64_t>& shape) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error(path + ": cannot open file");
  std::size_t count = 1;
  for (const std::int64_t side : shape) {
    if (side < 1) throw std::runtime_error("the model must have a fixed image size; export it without --dynamic-size");
    count *= static_cast<std::size_t>(side);
  }
  if (file.tellg() != static_cast<std::streamoff>(count * sizeof(float)))
    throw std::runtime_error(path + ": must have " + std::to_string(count * sizeof(float)) +
                             " bytes (fp32, the shape of the model's input), got " + std::to_string(file.tellg()));
  Image image{shape, {}, std::vector<float>(count)};
  file.seekg(0).read(reinterpret_cast<char*>(image.floats.data()), count * sizeof(float));
  return image;
}

/// Classifies one image per call.
class Classifier {
 public:
  explicit Classifier(const char* path)
      : env_(ORT_LOGGING_LEVEL_WARNING, "onnx_client"), session_(env_, path, Ort::SessionOptions{}) {
    const Ort::ModelMetadata metadata = session_.GetModelMetadata();
    const auto metadata_of = [&](const char* key) {
      const auto value = metadata.LookupCustomMetadataMapAllocated(key, allocator_);
      return value ? std::string(value.get()) : std::string();
    };
    const std::string output = metadata_of("vit_fast.output");
    if (output == "\"features\"") throw std::runtime_error("the model must output classes, got features");
    probabilities_ = output == "\"probabilities\"";
    names_ = Strings(metadata_of("vit_fast.class_names"));
    input_ = session_.GetInputNameAllocated(0, allocator_).get();
    output_ = session_.GetOutputNameAllocated(0, allocator_).get();
    const Ort::TypeInfo type = session_.GetInputTypeInfo(0);
    shape_ = type.GetTensorTypeAndShapeInfo().GetShape();
    type_ = type.GetTensorTypeAndShapeInfo().GetElementType();
    const bool pixels = type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    if (!(pixels || type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) || shape_.size() != 4 || shape_[0] > 1 ||
        (pixels && shape_[3] != 1 && shape_[3] != 3))
      throw std::runtime_error("the model's input must be fp32 [batch, channels, height, width] or uint8 [batch, "
                               "height, width, 1 or 3], for a batch of one");
    shape_[0] = 1;
  }

  Image Read(const std::string& path) const {
    return type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 ? ReadPixels(path, shape_[3]) : ReadFloats(path, shape_);
  }

  /// Returns up to kTop class names and probabilities, the most probable first.
  std::vector<std::pair<std::string, float>> Classify(Image& image) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const auto tensor = [&](auto& values) {
      return Ort::Value::CreateTensor(memory, values.data(), values.size(), image.shape.data(), image.shape.size());
    };
    const Ort::Value input = image.floats.empty() ? tensor(image.pixels) : tensor(image.floats);
    const char* const input_name = input_.c_str();
    const char* const output_name = output_.c_str();
    const auto outputs = session_.Run(Ort::RunOptions{}, &input_name, &input, 1, &output_name, 1);
    const auto info = outputs[0].GetTensorTypeAndShapeInfo();
    if (info.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || info.GetDimensionsCount() != 2)
      throw std::runtime_error("the model's output must be fp32 [batch, classes]");
    const float* const values = outputs[0].GetTensorData<float>();
    std::vector<float> scores(values, values + info.GetElementCount());
    if (!probabilities_) Softmax(scores);
    std::vector<std::size_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto one, auto other) { return scores[one] > scores[other]; });
    order.resize(std::min(order.size(), kTop));
    std::vector<std::pair<std::string, float>> best;
    for (const std::size_t i : order)
      best.emplace_back(i < names_.size() ? names_[i] : "class " + std::to_string(i), scores[i]);
    return best;
  }

 private:
  static void Softmax(std::vector<float>& logits) {
    const float most = *std::max_element(logits.begin(), logits.end());
    for (float& value : logits) value = std::exp(value - most);
    const float sum = std::accumulate(logits.begin(), logits.end(), 0.0f);
    for (float& value : logits) value /= sum;
  }

  Ort::Env env_;
  Ort::Session session_;
  Ort::AllocatorWithDefaultOptions allocator_;
  bool probabilities_ = false;
  std::vector<std::string> names_;
  std::string input_, output_;
  std::vector<std::int64_t> shape_;
  ONNXTensorElementDataType type_ = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s MODEL.onnx IMAGE...\n", argv[0]);
    return 2;
  }
  if (OrtGetApiBase()->GetApi(ORT_API_VERSION) == nullptr) {
    std::fprintf(stderr, "ONNX Runtime %s is older than the headers, 1.%d\n", OrtGetApiBase()->GetVersionString(),
                 ORT_API_VERSION);
    return 1;
  }
  try {
    Classifier classifier(argv[1]);
    for (int i = 2; i < argc; ++i) {
      Image image = classifier.Read(argv[i]);
      if (argc > 3) std::printf("%s\n", argv[i]);
      for (const auto& [name, score] : classifier.Classify(image)) std::printf("%9.4f  %s\n", score, name.c_str());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
    return 1;
  }
}
