#include "vector_template.h"

namespace orchard {
const VectorKernels* vector_avx512() { return &TABLE; }
}  // namespace orchard
