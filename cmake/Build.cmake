# Compiles the library. Everything here shapes its bytes, so prebuilt/manifest.json holds this file's hash.
include(cmake/Sources.cmake)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
enable_language(C)
enable_language(CXX)
set(_compilers "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
if(LINATTN_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  enable_language(CUDA)
  string(REPLACE "-real" "" _arch "${CMAKE_CUDA_ARCHITECTURES}")
  string(APPEND _compilers ", nvcc ${CMAKE_CUDA_COMPILER_VERSION}, sm_${_arch}")
else()
  string(APPEND _compilers ", no CUDA")
endif()

add_library(linattn SHARED ${LINATTN_SOURCES} ${LINATTN_CPU_SOURCES})
if(LINATTN_CUDA)
  target_sources(linattn PRIVATE ${LINATTN_CUDA_SOURCES})
  target_compile_definitions(linattn PRIVATE LINATTN_WITH_CUDA)
  target_include_directories(linattn SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(linattn PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    # The driver unpacks a kernel when it is first used; every driver that CUDA 13 runs on knows this format.
    target_compile_options(linattn PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-compress-mode=size>)
  endif()
  set_target_properties(linattn PROPERTIES
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static
    CUDA_COMPILER_LAUNCHER "${Python_EXECUTABLE};${CMAKE_CURRENT_SOURCE_DIR}/tools/ptxas_log.py")
endif()

set_target_properties(linattn PROPERTIES
  C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF C_VISIBILITY_PRESET hidden
  CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(linattn PRIVATE cuda cuda/include)
target_compile_definitions(linattn PRIVATE
  LINATTN_BUILD "LINATTN_VERSION=\"${PROJECT_VERSION}\"" "LINATTN_BUILD_INFO=\"${_compilers}\"")

# The host half of a .cu file takes the same options, through nvcc.
function(_host_options)
  foreach(option IN LISTS ARGN)
    target_compile_options(linattn PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:${option}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${option}>)
  endforeach()
endfunction()
# No path of this machine in the file: the same sources give the same bytes in any folder.
_host_options("-ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}=." -ffunction-sections -fdata-sections -Wall)
# A name that is cut to fit its field is meant to be.
_host_options(-Wno-stringop-truncation -Wno-format-truncation)
target_compile_options(linattn PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-Wextra>)
if(LINATTN_WERROR)
  _host_options(-Werror)
  target_compile_options(linattn PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()

# Vectorised loops without -ffast-math: inf and NaN keep their meaning, sums their order.
set_source_files_properties(${LINATTN_CPU_SOURCES} PROPERTIES COMPILE_OPTIONS
  "-O3;-fno-math-errno;-fno-trapping-math;-ffp-contract=fast;-fopenmp-simd")

find_package(Threads REQUIRED)
target_link_libraries(linattn PRIVATE Threads::Threads)
target_link_options(linattn PRIVATE
  "-Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cmake/linattn.map"
  -Wl,--exclude-libs,ALL -Wl,-z,defs -Wl,--gc-sections $<$<CONFIG:Release>:-Wl,-s>)
set_target_properties(linattn PROPERTIES LINK_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/linattn.map" SKIP_BUILD_RPATH ON)

option(LINATTN_GLIBC_FLOOR "Link so that the library loads on old glibc too (x86_64)" ON)
if(LINATTN_GLIBC_FLOOR AND CMAKE_SYSTEM_NAME STREQUAL Linux AND CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  include(cmake/GlibcFloor.cmake)
  target_glibc_floor(linattn)
endif()
