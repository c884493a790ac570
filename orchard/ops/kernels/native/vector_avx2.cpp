#include "vector_template.h"

namespace orchard {
const VectorKernels* vector_avx2() { return &TABLE; }
}  // namespace orchard
