"""What timeline.html looks like beside the other pages, and what a pointer and keys do in it."""

LOOK = """
.plot{position:relative;margin:28px 0 22px 74px}
.plot svg{display:block;width:100%;height:380px;background:var(--bg);border:1px solid var(--line)}
.plot svg:focus{outline:2px solid var(--accent)}
.y,.x,.phase{position:absolute;font-size:.76rem;color:var(--soft);white-space:nowrap;
font-variant-numeric:tabular-nums}
.y{right:100%;transform:translateY(-50%);padding-right:8px}
.x{top:100%;padding-top:3px}
.middle{transform:translateX(-50%)}
#peak{position:absolute;inset:0;pointer-events:none;font-size:.8rem;font-weight:600}
#peak i{position:absolute;margin:0 0 2px -5px;border:5px solid transparent;border-bottom:0;
border-top-color:var(--ink)}
#peak span{position:absolute;margin:0 0 7px;padding:0 4px;background:var(--bg);border-radius:4px;
white-space:nowrap}
#svg{touch-action:pan-y;cursor:crosshair}
.area{stroke-width:2;stroke-linejoin:bevel}
#dragged{fill:var(--accent);opacity:.25}
#zoom{margin:0 0 8px 74px}
button{font:inherit;color:inherit;background:var(--card);border:1px solid var(--soft);
border-radius:8px;padding:4px 12px;cursor:pointer}
.phase{bottom:100%;padding:0 0 3px 3px;overflow:hidden;text-overflow:ellipsis}
.band{fill:var(--soft);opacity:.09}.band.odd{opacity:0}
.edge{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3;opacity:.6}
.reserved{fill:none;stroke:var(--ink);stroke-width:1.5}
.halo{stroke:var(--card);stroke-width:5;opacity:.8}
.limitline{stroke:var(--does_not_fit);stroke-width:2;stroke-dasharray:8 4}
#hair{stroke:var(--accent);stroke-width:1.5}
.legend>span{margin-right:16px;white-space:nowrap;font-size:.85rem}
.stroke{display:inline-block;width:20px;height:0;margin-right:6px;vertical-align:4px;
border-top:2px solid var(--ink)}
.stroke.l{border-top:2px dashed var(--does_not_fit)}
#read{min-height:7.2em;margin-top:8px;border:1px solid var(--line);border-radius:8px;
padding:8px 12px;font-size:.88rem;overflow-wrap:anywhere}
@media (max-width:560px){.plot,#zoom{margin-left:62px}.plot .narrow,.plot .middle{display:none}}
"""
SCRIPT = """
(function(){
function id(n){return document.getElementById(n)}
var d=JSON.parse(id("data").textContent),p=d.points,all=Math.max(d.events,1);
var svg=id("svg"),hair=id("hair"),read=id("read"),box=id("dragged"),peak=id("peak");
var at=d.peak,from=0,to=all,drag=null,top=p[d.peak][0];
function size(n){var u=["B","KiB","MiB","GiB","TiB"],i=0;
while(Math.abs(n)>=1024&&i<4){n/=1024;i++}return(i?n.toFixed(2):n)+" "+u[i]}
function line(s){var e=document.createElement("div");e.textContent=s;read.appendChild(e)}
function view(middle,width){width=Math.min(all,Math.max(16,width));
from=Math.min(all-width,Math.max(0,middle-width/2));to=from+width;
svg.setAttribute("viewBox",from+" 0 "+width+" "+svg.viewBox.baseVal.height);
document.querySelectorAll(".x").forEach(function(e,i){
e.textContent="event "+Math.round(from+width*i/2).toLocaleString("en")});
document.querySelectorAll(".phase").forEach(function(e){
var a=Math.max(0,(e.dataset.from-from)/width),b=Math.min(1,(e.dataset.to-from)/width);
e.hidden=b-a<.05;e.classList.toggle("narrow",b-a<.3);
e.style.left=100*a+"%";e.style.width=100*(b-a)+"%"});
var s=(top-from)/width;peak.hidden=s<0||s>1;peak.firstChild.style.left=100*s+"%";
peak.lastChild.style.left=100*s+"%";peak.lastChild.style.transform="translateX("+-100*s+"%)"}
function show(i){at=Math.max(0,Math.min(p.length-1,i));var q=p[at],s=d.strings,x=q[0];
if(x<from||x>to)view(x,to-from);
hair.style.display=at===d.peak?"none":"";hair.setAttribute("x1",x);hair.setAttribute("x2",x);
read.textContent="";
line("event "+q[0].toLocaleString("en")+" of "+d.events.toLocaleString("en")+", "+s[q[2]]
+(at===d.peak?" (the peak)":""));
line(s[q[3]]);
line("tensors "+size(q[1])+(q[5]?", reserved "+size(q[5]):""));
var k=[];d.kinds.forEach(function(n,j){if(q[6][j])k.push(n+" "+size(q[6][j]))});
line(k.join(", "));if(s[q[4]])line(s[q[4]])}
function near(x){var a=0,b=p.length-1;while(a<b){var m=(a+b)>>1;
if(p[m][0]<x)a=m+1;else b=m}return a&&x-p[a-1][0]<p[a][0]-x?a-1:a}
function here(e){var r=svg.getBoundingClientRect();
return from+Math.min(1,Math.max(0,(e.clientX-r.left)/r.width))*(to-from)}
function mark(x){box.setAttribute("x",Math.min(drag,x));
box.setAttribute("width",Math.abs(drag-x))}
function zoom(f){view(p[at][0],(to-from)/f)}
function whole(){view(0,all)}
function toPeak(){show(d.peak);view(top,120)}
svg.addEventListener("pointerdown",function(e){if(e.button)return;
svg.setPointerCapture(e.pointerId);drag=here(e);mark(drag)});
svg.addEventListener("pointermove",function(e){var x=here(e);show(near(x));
if(drag!==null)mark(x)});
function end(e){if(drag===null)return;var x=here(e),a=drag;mark(a);drag=null;
if(e.type==="pointerup"&&Math.abs(x-a)/(to-from)*svg.getBoundingClientRect().width>=8)
view((x+a)/2,Math.abs(x-a))}
svg.addEventListener("pointerup",end);svg.addEventListener("pointercancel",end);
svg.addEventListener("keydown",function(e){
var by={ArrowLeft:-1,ArrowRight:1,PageUp:-25,PageDown:25}[e.key];
var act={"+":function(){zoom(4)},"=":function(){zoom(4)},"-":function(){zoom(.25)},
"0":whole,p:toPeak,Home:function(){show(d.peak)}}[e.key];
if(by)show(at+by);if(act)act();if(by||act)e.preventDefault()});
id("to-peak").onclick=toPeak;id("whole").onclick=whole;
id("in").onclick=function(){zoom(4)};id("out").onclick=function(){zoom(.25)};
id("zoom").hidden=false;show(d.peak)})();
"""
