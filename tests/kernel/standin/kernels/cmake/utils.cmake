# Takes back the architectures that torch's configuration puts into the flags.
macro(forget_arches)
  string(REGEX REPLACE "-gencode[ =]arch=[^ ]+" "" CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS}")
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endmacro()
