// Which agreement between Python and this library it was built for. Raise the number here and in `ABI` of __init__.py whenever an
// exported function changes its arguments or meaning, or the encoding of a plan changes: a library of older sources is then
// left alone instead of called wrongly.
extern "C" __attribute__((visibility("default"))) int orchard_abi() { return 8; }
