# Turns LINATTN_FROM = AUTO into SOURCE or PREBUILT and finds nvcc. The choice is tools/toolchain.py's, which the
# build backend of pip asks too.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

set(_ask "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/tools/toolchain.py" --from "${LINATTN_FROM}")
if(NOT LINATTN_CUDA)
  list(APPEND _ask --no-cuda)
endif()
if(CMAKE_CUDA_COMPILER)
  list(APPEND _ask --nvcc "${CMAKE_CUDA_COMPILER}")
endif()
execute_process(COMMAND ${_ask} OUTPUT_VARIABLE _choice ERROR_VARIABLE _why RESULT_VARIABLE _failed)
if(_failed)
  message(FATAL_ERROR "${_why}")
endif()
string(JSON LINATTN_FROM GET "${_choice}" from)
string(JSON _why GET "${_choice}" why)
message(STATUS "liblinattn.so: ${LINATTN_FROM}, ${_why}")

string(JSON _nvcc GET "${_choice}" nvcc)
string(JSON _wheel_root GET "${_choice}" wheel_root)
if(_nvcc AND NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER "${_nvcc}")
endif()
if(_wheel_root)
  set(CUDAToolkit_ROOT "${_wheel_root}")
  # nvcc.profile of the 13.0 wheel points to lib64/, the wheels have lib/.
  string(APPEND CMAKE_CUDA_FLAGS " -L${_wheel_root}/lib")
endif()
