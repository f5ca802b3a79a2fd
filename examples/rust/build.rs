//! Finds liblinattn.so: in the folder named by LINATTN_LIB_DIR, or in the installed Python package.
use std::process::Command;

fn folder_of_the_package() -> String {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let code = "import pylinattn; print(pylinattn.get_library_dir())";
    let found = Command::new(&python)
        .args(["-c", code])
        .output()
        .expect("python does not start");
    assert!(
        found.status.success(),
        "{}",
        String::from_utf8_lossy(&found.stderr)
    );
    String::from_utf8(found.stdout)
        .expect("a folder in UTF-8")
        .trim()
        .into()
}

fn main() {
    let folder = std::env::var("LINATTN_LIB_DIR").unwrap_or_else(|_| folder_of_the_package());
    println!("cargo:rerun-if-env-changed=LINATTN_LIB_DIR");
    println!("cargo:rustc-link-search=native={folder}");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
}
