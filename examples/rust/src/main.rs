//! Gated delta rule from Rust, checked against the plain loop.
mod linattn;

use linattn::{gdn_fwd, gdn_fwd_args, last_path, view};

const T: usize = 50;
const K: usize = 16;
const V: usize = 8;

fn waves(count: usize, step: f32) -> Vec<f32> {
    (1..=count).map(|i| 0.3 * (step * i as f32).sin()).collect()
}

/// S = exp(g) S;  u = beta (v - S'k);  S = S + k u';  o = S'q
fn plain(q: &[f32], k: &[f32], v: &[f32], g: &[f32], beta: &[f32]) -> Vec<f32> {
    let mut state = vec![0.0f32; K * V];
    let mut o = vec![0.0f32; T * V];
    for t in 0..T {
        state.iter_mut().for_each(|s| *s *= g[t].exp());
        for j in 0..V {
            let read: f32 = (0..K).map(|i| state[i * V + j] * k[t * K + i]).sum();
            let u = beta[t] * (v[t * V + j] - read);
            for i in 0..K {
                state[i * V + j] += k[t * K + i] * u;
                o[t * V + j] += state[i * V + j] * q[t * K + i];
            }
        }
    }
    o
}

fn main() -> Result<(), String> {
    let (mut q, mut k, mut v) = (waves(T * K, 1.1), waves(T * K, 1.7), waves(T * V, 2.3));
    let (mut g, mut beta) = (vec![-0.1f32; T], vec![0.5f32; T]);
    let mut o = vec![f32::NAN; T * V];

    let (t, heads) = (T as i64, 1);
    let mut args = gdn_fwd_args();
    args.q = view(&mut q, &[1, t, heads, K as i64]);
    args.k = view(&mut k, &[1, t, heads, K as i64]);
    args.v = view(&mut v, &[1, t, heads, V as i64]);
    args.g = view(&mut g, &[1, t, heads]);
    args.beta = view(&mut beta, &[1, t, heads]);
    args.o = view(&mut o, &[1, t, heads, V as i64]);
    args.scale = 1.0;
    unsafe { gdn_fwd(&args)? };

    let want = plain(&q, &k, &v, &g, &beta);
    let worst = o
        .iter()
        .zip(&want)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    println!("{}, largest error {worst:.1e}", last_path());

    args.k.shape[3] -= 1;
    println!(
        "{}",
        unsafe { gdn_fwd(&args) }.expect_err("a wrong shape was taken")
    );
    if worst < 1e-5 {
        Ok(())
    } else {
        Err(format!("the error is {worst}"))
    }
}
