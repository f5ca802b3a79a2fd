//! The part of linattn.h that this program calls, field by field.
use std::ffi::{c_char, c_void, CStr};

pub const F32: i32 = 1;
pub const CPU: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub data: *mut c_void,
    pub shape: [i64; 5],
    pub strides: [i64; 5],
    pub ndim: i32,
    pub dtype: i32,
    pub device_type: i32,
    pub device_id: i32,
    pub flags: u32,
    pub reserved: u32,
}

#[repr(C)]
pub struct GdnFwdArgs {
    pub size: u64,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub g: Tensor,
    pub beta: Tensor,
    pub initial_state: Tensor,
    pub cu_seqlens: Tensor,
    pub a_log: Tensor,
    pub dt_bias: Tensor,
    pub read_indices: Tensor,
    pub write_indices: Tensor,
    pub checkpoint_indices: Tensor,
    pub o: Tensor,
    pub final_state: Tensor,
    pub checkpoints: Tensor,
    pub saved: Tensor,
    pub workspace: Tensor,
    pub scale: f64,
    pub lower_bound: f64,
    pub qk_l2norm: i32,
    pub gate: i32,
    pub beta_form: i32,
    pub checkpoint_every: i32,
    pub save: i32,
    pub splits: i32,
    pub checked: i32,
    pub zero_tail: i32,
    pub stream: *mut c_void,
}

#[link(name = "linattn")]
extern "C" {
    fn linattn_gdn_fwd(args: *const GdnFwdArgs) -> i32;
    fn linattn_last_error() -> *const c_char;
    fn linattn_last_path() -> *const c_char;
}

/// All zero: every tensor not given, every option at its default. The size lets the library refuse another layout.
pub fn gdn_fwd_args() -> GdnFwdArgs {
    let mut args: GdnFwdArgs = unsafe { std::mem::zeroed() };
    args.size = std::mem::size_of::<GdnFwdArgs>() as u64;
    args
}

/// A row-major array on the host. The tensor borrows without saying so: `values` must outlive the call.
pub fn view(values: &mut [f32], shape: &[i64]) -> Tensor {
    assert_eq!(
        values.len() as i64,
        shape.iter().product::<i64>(),
        "elements of {shape:?}"
    );
    let mut tensor: Tensor = unsafe { std::mem::zeroed() };
    tensor.data = values.as_mut_ptr().cast();
    tensor.ndim = shape.len() as i32;
    (tensor.dtype, tensor.device_type) = (F32, CPU);
    let mut stride = 1;
    for axis in (0..shape.len()).rev() {
        (tensor.shape[axis], tensor.strides[axis]) = (shape[axis], stride);
        stride *= shape[axis];
    }
    tensor
}

fn text(chars: *const c_char) -> String {
    unsafe { CStr::from_ptr(chars) }
        .to_string_lossy()
        .into_owned()
}

/// # Safety
/// What the tensors of `args` point to must be as large as they say, and alive.
pub unsafe fn gdn_fwd(args: &GdnFwdArgs) -> Result<(), String> {
    match linattn_gdn_fwd(args) {
        0 => Ok(()),
        _ => Err(text(linattn_last_error())),
    }
}

pub fn last_path() -> String {
    text(unsafe { linattn_last_path() })
}
