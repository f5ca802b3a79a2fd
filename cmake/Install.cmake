# Two layouts: inside a wheel everything lies below pylinattn/; `cmake --install` elsewhere gives lib/ and include/.
if(DEFINED SKBUILD)
  set(_default ON)
endif()
option(LINATTN_PYTHON_LAYOUT "Install below pylinattn/, with the generated Python binding" ${_default})
if(LINATTN_PYTHON_LAYOUT)
  set(_lib pylinattn/lib)
  set(_include pylinattn/include)
else()
  set(CMAKE_INSTALL_LIBDIR lib CACHE PATH "")
  set(CMAKE_INSTALL_INCLUDEDIR include CACHE PATH "")
  set(_lib "${CMAKE_INSTALL_LIBDIR}")
  set(_include "${CMAKE_INSTALL_INCLUDEDIR}")
endif()

if(TARGET linattn)
  install(TARGETS linattn LIBRARY DESTINATION "${_lib}")
else()
  install(PROGRAMS prebuilt/liblinattn.so DESTINATION "${_lib}")
endif()
install(FILES cuda/include/linattn.h DESTINATION "${_include}")

# Both files find the rest from where they lie, so the folder may be moved.
file(RELATIVE_PATH LINATTN_PC_INCLUDE "/${_lib}/pkgconfig" "/${_include}")
file(RELATIVE_PATH LINATTN_CMAKE_INCLUDE "/${_lib}/cmake/pylinattn" "/${_include}")
configure_file(cmake/pylinattn.pc.in pylinattn.pc @ONLY)
configure_file(cmake/pylinattnConfig.cmake.in pylinattnConfig.cmake @ONLY)
include(CMakePackageConfigHelpers)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/pylinattnConfigVersion.cmake"
  VERSION "${PROJECT_VERSION}" COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/pylinattn.pc" DESTINATION "${_lib}/pkgconfig")
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/pylinattnConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/pylinattnConfigVersion.cmake"
  DESTINATION "${_lib}/cmake/pylinattn")

if(LINATTN_PYTHON_LAYOUT)
  set(_cdef "${CMAKE_CURRENT_BINARY_DIR}/_cdef.py")
  add_custom_command(OUTPUT "${_cdef}"
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/tools/gen_cdef.py"
            "${CMAKE_CURRENT_SOURCE_DIR}/cuda/include/linattn.h" "${_cdef}"
    DEPENDS tools/gen_cdef.py cuda/include/linattn.h VERBATIM)
  add_custom_target(cdef ALL DEPENDS "${_cdef}")
  install(FILES "${_cdef}" DESTINATION pylinattn)
endif()
